// ROCr functions: those that the agent calls, and those that it replaces.
#include <atomic>
#include <cstring>
#include <dlfcn.h>
#include <vector>

#include "agent.h"
#include "patch.h"
#include "file_code.h"

namespace gpubpf {

Functions hsa;
Originals originals;

namespace {

void *library() { return dlopen("libhsa-runtime64.so.1", RTLD_NOLOAD | RTLD_LAZY); }

// A table entry that the agent has replaced.
struct Replaced {
    void **entry, *ours, *original;
    bool in;
};
NeverDestroyed<std::vector<Replaced>> replaced_storage;
std::vector<Replaced> &replaced = replaced_storage.value;

bool exchange(void **entry, void *before, void *after) {
    return reinterpret_cast<std::atomic<void *> *>(entry)->compare_exchange_strong(before, after);
}

template <class Function>
void replace(void *&entry, Function &original, Function ours) {
    void *own = reinterpret_cast<void *>(ours);
    for (Replaced &r : replaced)
        if (r.entry == &entry) {
            // If `in` is still set, another tool has replaced ours with a function that calls it.
            if (!r.in) {
                r.original = entry;
                original = reinterpret_cast<Function>(entry);
                r.in = exchange(&entry, r.original, own);
            }
            return;
        }
    original = reinterpret_cast<Function>(entry);
    replaced.push_back({&entry, own, entry, true});
    exchange(&entry, entry, own);
}

// The table entry through which an exported ROCr function jumps.
struct Jump {
    hsa_table *table;
    size_t index;
};

// Decodes the jump from the file, because the code in memory may have a probe: [endbr64;] mov rax, [rip + D]; jmp [rax + offset].
bool jump_of(FileCode &file, void *rocr, const char *name, Jump &jump) {
    constexpr size_t kMost = 24;
    constexpr uint8_t kEndbr64[] = {0xF3, 0x0F, 0x1E, 0xFA}, kLoad[] = {0x48, 0x8B, 0x05};
    const auto *function = static_cast<const uint8_t *>(dlsym(rocr, name));
    if (!function) return false;
    const std::vector<uint8_t> code = file.read(function, kMost);
    if (code.size() != kMost) return false;
    const uint8_t *at = code.data();
    if (memcmp(at, kEndbr64, sizeof kEndbr64) == 0) at += sizeof kEndbr64;
    if (memcmp(at, kLoad, sizeof kLoad) != 0) return false;
    int32_t distance = 0, offset = 0;
    memcpy(&distance, at + sizeof kLoad, sizeof distance);
    at += sizeof kLoad + sizeof distance;
    const uint8_t *behind = function + (at - code.data());
    if (at[0] != 0xFF || (at[1] != 0x60 && at[1] != 0xA0)) return false;
    if (at[1] == 0xA0) memcpy(&offset, at + 2, sizeof offset);
    else offset = static_cast<int8_t>(at[2]);
    memcpy(&jump.table, behind + distance, sizeof jump.table);
    const int64_t functions = offset - int64_t(HSA_TABLE_ENTRY);
    if (!jump.table || functions < 0 || functions % int64_t(sizeof(void *))) return false;
    jump.index = static_cast<size_t>(functions) / sizeof(void *);
    return true;
}

}  // namespace

bool Functions::find() {
    void *rocr = library();
    bool all = rocr;
#define FIND(name) \
    if (all && !(name = reinterpret_cast<decltype(name)>(dlsym(rocr, "hsa_" #name)))) all = false
    FIND(init);
    FIND(shut_down);
    FIND(system_get_major_extension_table);
    FIND(iterate_agents);
    FIND(agent_get_info);
    FIND(memory_copy);
    FIND(executable_get_info);
    FIND(executable_create_alt);
    FIND(executable_iterate_agent_symbols);
    FIND(executable_symbol_get_info);
    FIND(queue_load_read_index_scacquire);
    FIND(queue_load_write_index_scacquire);
    FIND(queue_cas_write_index_scacq_screl);
    FIND(signal_destroy);
    FIND(signal_load_scacquire);
    FIND(signal_add_relaxed);
    FIND(signal_subtract_screlease);
    FIND(signal_store_relaxed);
    FIND(amd_signal_create);
    FIND(amd_agent_iterate_memory_pools);
    FIND(amd_memory_pool_get_info);
    FIND(amd_memory_pool_allocate);
    FIND(amd_memory_pool_free);
    FIND(amd_agents_allow_access);
    FIND(amd_memory_fill);
    FIND(amd_memory_lock);
    FIND(amd_memory_unlock);
    FIND(amd_pointer_info);
    FIND(amd_profiling_convert_tick_to_system_domain);
    FIND(amd_profiling_async_copy_enable);
    FIND(amd_profiling_set_profiler_enabled);
    FIND(amd_profiling_get_dispatch_time);
    FIND(amd_profiling_get_async_copy_time);
#undef FIND
    return all;
}

hsa_tables find_tables() {
    constexpr struct {
        const char *name;
        size_t index;
    } kCore[] = {
        {"hsa_queue_destroy", HSA_CORE_DESTROY_QUEUE},
        {"hsa_queue_add_write_index_scacq_screl", HSA_CORE_ADD_WRITE_INDEX},
        {"hsa_queue_add_write_index_screlease", HSA_CORE_ADD_WRITE_INDEX + 3},
        {"hsa_memory_allocate", HSA_CORE_ALLOCATE},
        {"hsa_memory_free", HSA_CORE_ALLOCATE + 1},
        {"hsa_signal_destroy", HSA_CORE_DESTROY_SIGNAL},
        {"hsa_signal_store_relaxed", HSA_CORE_STORE_RELAXED},
        {"hsa_signal_store_screlease", HSA_CORE_STORE_RELAXED + 1},
        {"hsa_executable_destroy", HSA_CORE_DESTROY_EXECUTABLE},
        {"hsa_executable_freeze", HSA_CORE_FREEZE},
        {"hsa_code_object_reader_create_from_file", HSA_CORE_READER_OF_FILE},
        {"hsa_code_object_reader_create_from_memory", HSA_CORE_READER_OF_MEMORY},
        {"hsa_code_object_reader_destroy", HSA_CORE_DESTROY_READER},
        {"hsa_executable_load_agent_code_object", HSA_CORE_LOAD},
    };
    void *rocr = library();
    Jump core{}, amd{};
    FileCode file;
    if (!rocr || !jump_of(file, rocr, "hsa_queue_create", core) || core.index != HSA_CORE_CREATE_QUEUE)
        return {};
    for (const auto &known : kCore) {
        Jump jump{};
        if (!jump_of(file, rocr, known.name, jump) || jump.table != core.table || jump.index != known.index)
            return {};
    }
    if (!jump_of(file, rocr, "hsa_amd_memory_async_copy", amd) || amd.index != HSA_AMD_COPY) return {};
    const int at = HSA_AMD_INTERCEPT(hsa_functions_of(amd.table));
    const struct {
        const char *name;
        int index;
    } amds[] = {
        {"hsa_amd_memory_pool_allocate", HSA_AMD_ALLOCATE},
        {"hsa_amd_memory_pool_free", HSA_AMD_ALLOCATE + 1},
        {"hsa_amd_memory_lock", HSA_AMD_LOCK(at)},
        {"hsa_amd_memory_unlock", HSA_AMD_LOCK(at) + 1},
        {"hsa_amd_memory_lock_to_pool", HSA_AMD_LOCK_TO_POOL(at)},
        {"hsa_amd_memory_async_copy_rect", HSA_AMD_COPY_BOX(at)},
    };
    for (const auto &known : amds) {
        Jump jump{};
        if (at < 0 || !jump_of(file, rocr, known.name, jump) || jump.table != amd.table ||
            jump.index != static_cast<size_t>(known.index))
            return {};
    }
    return {{}, core.table, amd.table};
}

void put_in(const hsa_tables &tables, bool running, bool operations, bool allocations) {
    void **core = tables.core->functions, **amd = tables.amd->functions;
    const int at = HSA_AMD_INTERCEPT(hsa_functions_of(tables.amd));
    if (running) {
        auto &add = originals.add_write_index;
        void **entry = &core[HSA_CORE_ADD_WRITE_INDEX];
        replace(entry[0], add[0], on_add_write_index<0>);
        replace(entry[1], add[1], on_add_write_index<1>);
        replace(entry[2], add[2], on_add_write_index<2>);
        replace(entry[3], add[3], on_add_write_index<3>);
        replace(core[HSA_CORE_STORE_RELAXED], originals.store_relaxed, on_store_relaxed);
        replace(core[HSA_CORE_STORE_RELAXED + 1], originals.store_screlease, on_store_screlease);
    } else {
        originals.create_intercepted_queue = reinterpret_cast<hsa_create_queue>(amd[at]);
        originals.intercept = reinterpret_cast<hsa_intercept>(amd[at + 1]);
        replace(core[HSA_CORE_CREATE_QUEUE], originals.create_queue, on_create_queue);
    }
    replace(core[HSA_CORE_DESTROY_QUEUE], originals.destroy_queue, on_destroy_queue);
    replace(core[HSA_CORE_FREEZE], originals.freeze, on_freeze);
    replace(core[HSA_CORE_DESTROY_EXECUTABLE], originals.destroy_executable, on_destroy_executable);
    replace(core[HSA_CORE_READER_OF_FILE], originals.reader_of_file, on_reader_of_file);
    replace(core[HSA_CORE_READER_OF_MEMORY], originals.reader_of_memory, on_reader_of_memory);
    replace(core[HSA_CORE_DESTROY_READER], originals.destroy_reader, on_destroy_reader);
    replace(core[HSA_CORE_LOAD], originals.load, on_load);
    if (allocations) {
        replace(core[HSA_CORE_ALLOCATE], originals.allocate, on_allocate);
        replace(core[HSA_CORE_ALLOCATE + 1], originals.free, on_free);
        replace(amd[HSA_AMD_ALLOCATE], originals.pool_allocate, on_pool_allocate);
        replace(amd[HSA_AMD_ALLOCATE + 1], originals.pool_free, on_pool_free);
        replace(amd[HSA_AMD_LOCK(at)], originals.lock, on_lock);
        replace(amd[HSA_AMD_LOCK(at) + 1], originals.unlock, on_unlock);
        if (const size_t to_pool = HSA_AMD_LOCK_TO_POOL(at); to_pool < hsa_functions_of(tables.amd))
            replace(amd[to_pool], originals.lock_to_pool, on_lock_to_pool);
    }
    if (!operations) return;
    replace(core[HSA_CORE_DESTROY_SIGNAL], originals.destroy_signal, on_destroy_signal);
    replace(amd[HSA_AMD_COPY], originals.copy, on_copy);
    if (HSA_AMD_HAS_ENGINES(at))
        replace(amd[HSA_AMD_COPY_BY_ENGINE], originals.copy_by_engine, on_copy_by_engine);
    if (const size_t box = HSA_AMD_COPY_BOX(at); box < hsa_functions_of(tables.amd))
        replace(amd[box], originals.copy_box, on_copy_box);
}

void take_out_of_tables() {
    for (Replaced &r : replaced)
        if (r.in) r.in = !exchange(r.entry, r.ours, r.original);
    barrier_in_all_threads();
}

}  // namespace gpubpf
