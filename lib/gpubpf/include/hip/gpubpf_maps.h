// Maps in the kernels of your own HIP program. The maps are written as JSON when the process ends, without a tool.
//
//     #include <gpubpf_maps.h>                  hipcc -I"$(python3 -m gpubpf.include)" …
//
//     GPUBPF_ARRAY(paths, unsigned, 3);         at namespace scope, outside any namespace
//     GPUBPF_HASH(keys, int, float, 1024);
//     GPUBPF_HISTOGRAM(lengths);
//
//     __global__ void kernel(…) {
//         paths.increment(2);
//         if (float *sum = keys.lookup_or_init(key)) atomicAdd(sum, 1.5f);
//         lengths.increment(length);
//     }
//
//     GPUBPF_MAPS=maps.%p.json ./program        %p is the process id; without the variable nothing is written
//
// Each line is a map of one GPU, as a JSON record. docs/own-maps.md describes its fields.
#pragma once

#include <hip/hip_runtime.h>

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// The map `name` of `size` values, by index.
#define GPUBPF_ARRAY(name, value, size) GPUBPF_MAP_(name, gpubpf::Array<value, size>)
// The map `name` of at most `size` values, by a key that is an integer.
#define GPUBPF_HASH(name, key, value, size) GPUBPF_MAP_(name, gpubpf::Hash<key, value, size>)
// The map `name`, which counts numbers by their powers of two.
#define GPUBPF_HISTOGRAM(name) GPUBPF_MAP_(name, gpubpf::Histogram)

// The variable, and a second one beside it that describes it.
#define GPUBPF_MAP_(name, ...)                                \
    __device__ __VA_ARGS__ name __asm__("gpubpf_map." #name); \
    extern "C" __device__ __attribute__((used))               \
    const gpubpf::Description gpubpf_of_##name __asm__("gpubpf_of." #name) = __VA_ARGS__::description()

namespace gpubpf {

using Number = unsigned long long;

enum class Kind : unsigned { Array = 1, Hash = 2, Histogram = 3 };
enum class Format : unsigned { Unsigned, Signed, Float, Bytes };

struct Description {
    unsigned magic, version;
    Kind kind;
    Format keys, values;
    unsigned value_bytes;
    Number entries, bytes, values_at;  // values_at: where the first value is, in bytes from the beginning
};
constexpr unsigned kMagic = 0x70614d67, kVersion = 1;  // "gMap"

template <class Value>
constexpr Format format() {
    return std::is_floating_point<Value>::value ? Format::Float
           : !std::is_integral<Value>::value    ? Format::Bytes
           : std::is_signed<Value>::value       ? Format::Signed
                                                : Format::Unsigned;
}

template <class Value, unsigned kSize>
struct Array {
    static_assert(kSize && std::is_trivial<Value>::value, "at least one value, which can be copied as bytes");
    Value values[kSize];

    // Returns the value at an index; null if there is none.
    __device__ Value *lookup(Number index) { return index < kSize ? &values[index] : nullptr; }
    __device__ void increment(Number index, Value by = 1) {
        if (Value *value = lookup(index)) atomicAdd(value, by);
    }
    static constexpr Description description() {
        return {kMagic,        kVersion, Kind::Array, Format::Unsigned, format<Value>(), sizeof(Value), kSize,
                sizeof(Array), 0};
    }
};

template <class Key, class Value, unsigned kSize>
struct Hash {
    static_assert(std::is_integral<Key>::value && sizeof(Key) <= 8, "keys are integers");
    static_assert(kSize && std::is_trivial<Value>::value, "at least one value, which can be copied as bytes");
    Number lost;  // updates for which there was no room
    Number taken[kSize +
                 1];  // a place's key + 1; 0: free. The last place is that of the key whose bits are all set
    Value values[kSize + 1];

    // Returns the value of a key; null if there is none.
    __device__ Value *lookup(Key key) { return find(key, false); }
    // The same, but adds a missing key with a value of zeros. If there is no room, counts that and returns null.
    __device__ Value *lookup_or_init(Key key) {
        Value *found = find(key, true);
        if (!found) atomicAdd(&lost, Number(1));
        return found;
    }
    __device__ void increment(Key key, Value by = 1) {
        if (Value *value = lookup_or_init(key)) atomicAdd(value, by);
    }
    static constexpr Description description() {
        return {kMagic,        kVersion, Kind::Hash,   format<Key>(), format<Value>(),
                sizeof(Value), kSize,    sizeof(Hash), kValues};
    }

  private:
    static constexpr Number kValues =
        (sizeof(Number) * (kSize + 2) + alignof(Value) - 1) / alignof(Value) * alignof(Value);

    __device__ Value *find(Key key, bool add) {
        const Number mark = Number(key) + 1;
        const Number first = Number(key) * 0x9E3779B97F4A7C15ull >> 32;
        for (unsigned i = 0; i < kSize; ++i) {
            const Number place = mark ? (first + i) % kSize : kSize, mine = mark ? mark : 1;
            Number there = __atomic_load_n(&taken[place], __ATOMIC_RELAXED);
            if (!there && add) there = atomicCAS(&taken[place], Number(0), mine);
            if (there == mine || (!there && add)) return &values[place];
            if (!there || !mark) return nullptr;
        }
        return nullptr;
    }
};

struct Histogram {
    Number buckets[65];  // how many numbers have 0, 1, 2 … bits

    __device__ void increment(Number value, Number by = 1) {
        atomicAdd(&buckets[value ? 64 - __clzll(static_cast<long long>(value)) : 0], by);
    }
    static constexpr Description description() {
        return {kMagic,
                kVersion,
                Kind::Histogram,
                Format::Unsigned,
                Format::Unsigned,
                sizeof(Number),
                65,
                sizeof(Histogram),
                0};
    }
};

// Finds the maps of all code objects on all GPUs through ROCr, and writes them. Does nothing if ROCr is not running.
class Maps {
  public:
    static Maps &all() {
        static Maps *made = new Maps;  // never destroyed: the process's last functions use it
        return *made;
    }

    // Replaces the file that GPUBPF_MAPS names by the maps. Returns the number of maps; if there are none, it writes nothing, so that
    // it can be called again.
    size_t write() {
        const char *pattern = getenv("GPUBPF_MAPS");
        std::lock_guard<std::mutex> hold(lock_);
        if (!pattern || !*pattern || of_parent_ || !is_running()) return 0;
        wait_for_kernels();
        std::vector<Found> found = find();
        if (found.empty()) return 0;
        std::sort(found.begin(), found.end(), [](const Found &a, const Found &b) {
            return std::tie(a.name, a.gpu) < std::tie(b.name, b.gpu);
        });
        std::string text;
        for (const Found &map : found) text += json(map);
        const std::string path = path_of(pattern);
        FILE *file = fopen(path.c_str(), "w");
        const bool written = file && fwrite(text.data(), 1, text.size(), file) == text.size();
        if (!file || fclose(file) != 0 || !written) {
            fprintf(stderr, "gpubpf: cannot write the maps to %s: %s\n", path.c_str(), strerror(errno));
            return 0;
        }
        return found.size();
    }

  private:
    struct Handle {
        uint64_t handle;
    };
    using Status = int;  // 0: done; 1: an iteration ended early, as asked
    struct Loader {      // hsa_ven_amd_loader_1_03_pfn_t
        void *others[6];
        Status (*iterate_executables)(Status (*)(Handle executable, void *), void *);
    };
    struct Found {
        std::string name;
        unsigned gpu;
        Description is;
        std::vector<char> content;
    };
    struct Variable {
        uint64_t address;
        uint32_t bytes;
    };
    enum {
        kLoader = 0x201,
        kDevice = 17,
        kGpu = 1,
        kType = 0,
        kNameLength = 1,
        kName = 2,
        kSize = 9,
        kAddress = 21
    };
    static constexpr uint64_t kMost = 256 << 20;  // bytes of a map

    std::mutex lock_;
    std::atomic<bool> of_parent_{false};  // this process was forked while ROCr ran, and cannot use it
    Status (*table_)(uint16_t, uint16_t, size_t, void *) = nullptr;
    Status (*agents_)(Status (*)(Handle, void *), void *) = nullptr;
    Status (*agent_)(Handle, int, void *) = nullptr;
    Status (*symbols_)(Handle, Handle, Status (*)(Handle, Handle, Handle, void *), void *) = nullptr;
    Status (*symbol_)(Handle, int, void *) = nullptr;
    Status (*copy_)(void *, const void *, size_t) = nullptr;
    Loader loader_{};

    Maps() {
        atexit([] { all().write(); });
        pthread_atfork([] { all().lock_.lock(); }, [] { all().lock_.unlock(); },
                       [] {
                           all().lock_.unlock();
                           all().of_parent_ = all().is_running();
                       });
    }

    template <class Function>
    static bool get(Function &function, const char *name) {
        static void *const library = dlopen("libhsa-runtime64.so.1", RTLD_LAZY | RTLD_NOLOAD);
        void *at = dlsym(RTLD_DEFAULT, name);
        if (!at && library) at = dlsym(library, name);
        memcpy(&function, &at, sizeof at);
        return at;
    }

    bool is_running() {
        return get(table_, "hsa_system_get_major_extension_table") && get(agents_, "hsa_iterate_agents") &&
               get(agent_, "hsa_agent_get_info") && get(symbols_, "hsa_executable_iterate_agent_symbols") &&
               get(symbol_, "hsa_executable_symbol_get_info") && get(copy_, "hsa_memory_copy") &&
               !table_(kLoader, 1, sizeof loader_, &loader_) && loader_.iterate_executables;
    }

    static void wait_for_kernels() {
        int count = 0, current = 0;
        if (hipGetDevice(&current) != hipSuccess || hipGetDeviceCount(&count) != hipSuccess) return;
        for (int device = 0; device < count; ++device)
            if (hipSetDevice(device) == hipSuccess) (void)hipDeviceSynchronize();
        (void)hipSetDevice(current);
    }

    std::vector<Found> find() {
        std::vector<Handle> gpus, executables;
        agents_(
            [](Handle one, void *to) -> Status {
                int device = 0;
                if (!all().agent_(one, kDevice, &device) && device == kGpu)
                    static_cast<std::vector<Handle> *>(to)->push_back(one);
                return 0;
            },
            &gpus);
        loader_.iterate_executables(
            [](Handle one, void *to) -> Status {
                if (one.handle) static_cast<std::vector<Handle> *>(to)->push_back(one);
                return 0;
            },
            &executables);
        std::vector<Found> found;
        std::set<uint64_t> seen;  // addresses
        for (unsigned gpu = 0; gpu < gpus.size(); ++gpu)
            for (const Handle &executable : executables) {
                std::vector<std::pair<std::string, Variable>> variables;
                const Status status = symbols_(executable, gpus[gpu], add_symbol, &variables);
                if (status > 1) warn("a code object", "ROCr cannot list its variables");
                for (const auto &of : variables)
                    if (of.first.compare(0, 10, "gpubpf_of.") == 0)
                        for (const auto &map : variables)
                            if (map.first == "gpubpf_map." + of.first.substr(10) &&
                                seen.insert(map.second.address).second)
                                read(of.first.substr(10), gpu, of.second, map.second, found);
            }
        return found;
    }

    static Status add_symbol(Handle, Handle, Handle symbol, void *to) {
        uint32_t type = 0, length = 0;
        Variable made{};
        auto &ask = all().symbol_;
        if (ask(symbol, kType, &type) || type != 0 || ask(symbol, kNameLength, &length) || length > 4096)
            return 0;
        std::string name(length, 0);
        if (!ask(symbol, kName, &name[0]) && !ask(symbol, kAddress, &made.address) &&
            !ask(symbol, kSize, &made.bytes))
            static_cast<std::vector<std::pair<std::string, Variable>> *>(to)->emplace_back(name, made);
        return 0;
    }

    static void warn(const std::string &what, const char *why) {
        fprintf(stderr, "gpubpf: %s is left out: %s\n", what.c_str(), why);
    }

    // Appends the content of a map, if it is what its description says.
    void read(const std::string &name, unsigned gpu, Variable of, Variable map, std::vector<Found> &found) {
        Found made{name, gpu, {}, {}};
        if (of.bytes != sizeof made.is ||
            copy_(&made.is, reinterpret_cast<void *>(of.address), sizeof made.is))
            return warn("the map " + name, "it has no description");
        const Description &is = made.is;
        if (is.magic != kMagic || is.version != kVersion)
            return warn("the map " + name, "it was built with another version of gpubpf_maps.h");
        if (map.bytes > kMost) return warn("the map " + name, "it is larger than 256 MiB");
        if (is.bytes != map.bytes || !is_sound(is))
            return warn("the map " + name, "its size is not what its description says");
        made.content.resize(map.bytes);
        if (copy_(made.content.data(), reinterpret_cast<void *>(map.address), map.bytes))
            return warn("the map " + name, "ROCr cannot copy it");
        found.push_back(std::move(made));
    }

    static bool is_sound(const Description &is) {
        if (!is.entries || is.entries > kMost || !is.value_bytes || is.value_bytes > kMost) return false;
        if (is.values > Format::Bytes || is.keys > Format::Signed) return false;
        if (is.values != Format::Bytes && is.value_bytes & (is.value_bytes - 1)) return false;
        if (is.values != Format::Bytes && is.value_bytes > 8) return false;
        if (is.kind == Kind::Histogram) return is.entries == 65 && is.bytes == 65 * sizeof(Number);
        if (is.kind == Kind::Array) return is.bytes == is.entries * is.value_bytes;
        return is.kind == Kind::Hash && is.values_at >= (is.entries + 2) * sizeof(Number) &&
               is.values_at <= is.bytes && (is.entries + 1) * is.value_bytes <= is.bytes - is.values_at;
    }

    static Number number_at(const char *at) {
        Number value;
        memcpy(&value, at, sizeof value);
        return value;
    }

    static std::string integer(Number value, bool is_signed) {
        return is_signed ? std::to_string(static_cast<long long>(value)) : std::to_string(value);
    }

    static std::string value(const Description &is, const char *at) {
        char text[40];
        if (is.values == Format::Bytes) {
            std::string made = "\"";
            for (unsigned i = 0; i < is.value_bytes; ++i) {
                snprintf(text, sizeof text, "%02x", static_cast<unsigned char>(at[i]));
                made += text;
            }
            return made + '"';
        }
        if (is.values == Format::Float) {
            double number = 0;
            float single = 0;
            if (is.value_bytes == sizeof single) memcpy(&single, at, sizeof single), number = single;
            else if (is.value_bytes == sizeof number) memcpy(&number, at, sizeof number);
            if (!std::isfinite(number)) return "null";  // JSON has no such number
            snprintf(text, sizeof text, "%.*g", is.value_bytes == sizeof single ? 9 : 17, number);
            return text;
        }
        Number bits = 0;
        memcpy(&bits, at, is.value_bytes);
        const unsigned unused = 64 - 8 * is.value_bytes;
        if (is.values == Format::Signed)
            return std::to_string(static_cast<long long>(bits << unused) >> unused);
        return std::to_string(bits);
    }

    // Returns the line of a map.
    static std::string json(const Found &map) {
        static const char *const kKinds[] = {"", "array", "hash", "histogram"};
        const Description &is = map.is;
        const char *content = map.content.data();
        std::string text = "{\"type\":\"map\",\"map\":\"" + map.name + "\",\"kind\":\"" +
                           kKinds[unsigned(is.kind)] +
                           "\",\"vendor\":\"amd\",\"gpu\":" + std::to_string(map.gpu) +
                           ",\"pid\":" + std::to_string(getpid());
        std::string entries;
        const auto add = [&](const std::string &entry) { entries += (entries.empty() ? "" : ",") + entry; };
        if (is.kind == Kind::Histogram) {
            for (unsigned bits = 0; bits < is.entries; ++bits) {
                const Number count = number_at(content + bits * sizeof(Number));
                const Number low = bits ? Number(1) << (bits - 1) : 0;
                if (count)
                    add("[" + std::to_string(low) + "," + std::to_string(bits ? low + (low - 1) : 0) + "," +
                        std::to_string(count) + "]");
            }
            return text + ",\"buckets\":[" + entries + "]}\n";
        }
        const bool hash = is.kind == Kind::Hash;
        const char *marks = content + sizeof(Number);
        const char *values = content + (hash ? is.values_at : 0);
        for (Number i = 0; i < is.entries + hash; ++i) {
            Number key = i;
            if (hash) {
                const Number mark = number_at(marks + i * sizeof(Number));
                if (!mark) continue;
                key = i == is.entries ? ~Number(0) : mark - 1;
            }
            add("{\"key\":" + integer(key, is.keys == Format::Signed) +
                ",\"value\":" + value(is, values + i * is.value_bytes) + "}");
        }
        text += ",\"entries\":[" + entries + "]";
        if (hash) text += ",\"lost\":" + std::to_string(number_at(content));
        return text + "}\n";
    }

    static std::string path_of(const char *pattern) {
        std::string path = pattern;
        for (size_t at; (at = path.find("%p")) != std::string::npos;)
            path.replace(at, 2, std::to_string(getpid()));
        return path;
    }
};

// Writes the maps now, and again when the process ends. Returns how many there are.
inline size_t write_maps() { return Maps::all().write(); }

// At exit, what belongs to the main thread is destroyed first, while HIP still has its code objects. Maps::write is registered with
// atexit, too, for a process that another thread ends.
struct AtExit {
    ~AtExit() { write_maps(); }
    void come() {}
};
inline AtExit &at_exit() {
    thread_local AtExit made;
    return made;
}
static const bool kReady = (Maps::all(), at_exit().come(), true);

}  // namespace gpubpf
