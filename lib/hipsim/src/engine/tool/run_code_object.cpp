// Runs kernels of a code object on the engine alone, for tests: no HIP, no ROCr. Reads commands from standard input:
//
//     load FILE                      the code object that `run` means from now on
//     buffer NAME BYTES [FILE]       memory of the device, with the content of FILE, else zeros
//     pages NAME COUNT FILE          pages of memory of the device, with the content of FILE. Page n is 2 n pages behind the address
//                                    of the buffer, and before and behind each is a page without access
//     argument KIND VALUE            appended to the kernel's arguments, aligned: u32 N, u64 N, buffer NAME
//     run KERNEL GX GY GZ X Y Z LDS  grid and workgroup in work-items; prints `ok INSTRUCTIONS END_NS` or `fault KIND TEXT`
//     dump NAME FILE                 writes a buffer to a file, and prints `ok`
//     free NAME
//     set NAME VALUE                 threads, virtual, hostile
//     text FILE                      prints the code of FILE: for each instruction its address, size and text
//     gpu NAME                       executes the instructions of this GPU from now on
//     names                          prints what the engine executes of the GPU's family

#include "engine/engine.h"
#include "engine/registry.h"
#include "isa/instruction.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <elf.h>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <vector>

using namespace hipsim;

namespace {

class Mapping {
  public:
    explicit Mapping(uint64_t bytes) : bytes((bytes + 4095) & ~uint64_t{4095}) {
        at = static_cast<uint8_t *>(
            mmap(nullptr, this->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (at == MAP_FAILED) throw std::bad_alloc();
    }
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;
    ~Mapping() { munmap(at, bytes); }
    uint8_t *at;
    uint64_t bytes;
};

class ToolMemory : public Memory {
  public:
    void range(uint64_t address, uint64_t *begin, uint64_t *end, bool *may_write) override {
        std::lock_guard lock(mutex_);
        *begin = *end = 0;
        auto after = ranges_.upper_bound(address);
        if (after == ranges_.begin()) return;
        auto &[first, last] = *std::prev(after);
        if (address >= last) return;
        *begin = first;
        *end = last;
        *may_write = true;
    }
    void add(const void *at, uint64_t bytes) { ranges_[uint64_t(at)] = uint64_t(at) + bytes; }
    void remove(const void *at) { ranges_.erase(uint64_t(at)); }

  private:
    std::mutex mutex_;
    std::map<uint64_t, uint64_t> ranges_;
};

class ToolServices : public Services {
  public:
    void interrupt(uint32_t m0) override { std::fprintf(stderr, "interrupt %u\n", m0); }
    uint64_t counter() override {
        return uint64_t(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
    }
};

std::vector<uint8_t> contents(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct CodeObject {
    std::unique_ptr<Mapping> image;
    std::map<std::string, uint64_t> symbols;  // values in the file

    explicit CodeObject(const std::string &path) {
        std::vector<uint8_t> file = contents(path);
        auto *header = reinterpret_cast<const Elf64_Ehdr *>(file.data());
        if (file.size() < sizeof *header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0)
            throw std::runtime_error(path + " is not an ELF file");
        auto *segments = reinterpret_cast<const Elf64_Phdr *>(file.data() + header->e_phoff);
        uint64_t end = 0;
        for (unsigned n = 0; n < header->e_phnum; ++n)
            if (segments[n].p_type == PT_LOAD) end = std::max(end, segments[n].p_vaddr + segments[n].p_memsz);
        image = std::make_unique<Mapping>(end);
        for (unsigned n = 0; n < header->e_phnum; ++n)
            if (segments[n].p_type == PT_LOAD)
                std::memcpy(image->at + segments[n].p_vaddr, file.data() + segments[n].p_offset,
                            segments[n].p_filesz);
        auto *sections = reinterpret_cast<const Elf64_Shdr *>(file.data() + header->e_shoff);
        for (unsigned n = 0; n < header->e_shnum; ++n) {
            const Elf64_Shdr &section = sections[n];
            if (section.sh_type == SHT_DYNSYM) {
                auto *symbol = reinterpret_cast<const Elf64_Sym *>(file.data() + section.sh_offset);
                auto *names =
                    reinterpret_cast<const char *>(file.data() + sections[section.sh_link].sh_offset);
                for (uint64_t k = 0; k < section.sh_size / sizeof *symbol; ++k)
                    symbols[names + symbol[k].st_name] = symbol[k].st_value;
            } else if (section.sh_type == SHT_RELA) {
                constexpr unsigned relative64 = 13;  // R_AMDGPU_RELATIVE64
                auto *rela = reinterpret_cast<const Elf64_Rela *>(file.data() + section.sh_offset);
                for (uint64_t k = 0; k < section.sh_size / sizeof *rela; ++k) {
                    if (ELF64_R_TYPE(rela[k].r_info) != relative64) continue;
                    uint64_t value = uint64_t(image->at) + uint64_t(rela[k].r_addend);
                    std::memcpy(image->at + rela[k].r_offset, &value, 8);
                }
            }
        }
    }
};

constexpr uint64_t page = 4096;

// Memory of the device: `parts` ranges of `bytes` bytes. Each begins `apart` bytes behind the one before.
struct Buffer {
    std::unique_ptr<Mapping> memory;
    uint64_t bytes, first = 0, parts = 1, apart = 0;

    uint8_t *at(uint64_t part = 0) const { return memory->at + first + part * apart; }
};

class Tool {
  public:
    bool command(const std::string &line) {
        std::istringstream words(line);
        std::string verb;
        words >> verb;
        if (verb == "load") return load(words);
        if (verb == "buffer") return buffer(words);
        if (verb == "pages") return pages(words);
        if (verb == "argument") return argument(words);
        if (verb == "run") return run_kernel(words);
        if (verb == "dump") return dump(words);
        if (verb == "free") return release(words);
        if (verb == "set") return set(words);
        if (verb == "gpu") return choose(words);
        if (verb == "text") return print_text(words);
        if (verb == "names") return print_names();
        throw std::runtime_error("unknown command " + verb);
    }

  private:
    bool load(std::istream &words) {
        std::string path;
        words >> path;
        if (!loaded_.count(path)) {
            loaded_[path] = std::make_unique<CodeObject>(path);
            memory_.add(loaded_[path]->image->at, loaded_[path]->image->bytes);
        }
        code_ = loaded_[path].get();
        return true;
    }
    bool buffer(std::istream &words) {
        std::string name, path;
        uint64_t bytes = 0;
        words >> name >> bytes >> path;
        auto memory = std::make_unique<Mapping>(bytes);
        if (!path.empty()) {
            auto content = contents(path);
            std::memcpy(memory->at, content.data(), std::min<uint64_t>(content.size(), bytes));
        }
        memory_.add(memory->at, bytes);
        buffers_[name] = {std::move(memory), bytes};
        return true;
    }
    bool pages(std::istream &words) {
        std::string name, path;
        uint64_t count = 0;
        words >> name >> count >> path;
        auto content = contents(path);
        content.resize(count * page);
        Buffer made{std::make_unique<Mapping>((2 * count + 1) * page), page, page, count, 2 * page};
        mprotect(made.memory->at, made.memory->bytes, PROT_NONE);
        for (uint64_t n = 0; n < count; ++n) {
            mprotect(made.at(n), page, PROT_READ | PROT_WRITE);
            std::memcpy(made.at(n), content.data() + n * page, page);
            memory_.add(made.at(n), page);
        }
        buffers_[name] = std::move(made);
        return true;
    }
    bool release(std::istream &words) {
        std::string name;
        words >> name;
        const Buffer &buffer = buffers_.at(name);
        for (uint64_t n = 0; n < buffer.parts; ++n) memory_.remove(buffer.at(n));
        buffers_.erase(name);
        return true;
    }
    bool argument(std::istream &words) {
        std::string kind, value;
        words >> kind >> value;
        uint64_t number =
            kind == "buffer" ? uint64_t(buffers_.at(value).at()) : std::stoull(value, nullptr, 0);
        std::size_t bytes = kind == "u32" ? 4 : 8;
        arguments_.resize((arguments_.size() + bytes - 1) / bytes * bytes);
        arguments_.insert(arguments_.end(), reinterpret_cast<uint8_t *>(&number),
                          reinterpret_cast<uint8_t *>(&number) + bytes);
        return true;
    }
    bool run_kernel(std::istream &words) {
        std::string kernel;
        Launch launch;
        words >> kernel;
        for (uint32_t &n : launch.grid) words >> n;
        for (uint32_t &n : launch.group) words >> n;
        words >> launch.group_bytes;
        if (!code_ || !code_->symbols.count(kernel + ".kd")) throw std::runtime_error("no kernel " + kernel);
        launch.kernel_object = uint64_t(code_->image->at) + code_->symbols[kernel + ".kd"];
        uint32_t least[2];  // of the descriptor: LDS and scratch
        std::memcpy(least, host(launch.kernel_object), sizeof least);
        launch.group_bytes = std::max(launch.group_bytes, least[0]);
        launch.private_bytes = std::max(launch.private_bytes, least[1]);
        // The kernarg segment and, behind it, the packet.
        Mapping segment(arguments_.size() + 4096);
        std::copy(arguments_.begin(), arguments_.end(), segment.at);
        arguments_.clear();
        uint8_t *packet = segment.at + segment.bytes - 64;
        for (unsigned d = 0; d < 3; ++d) {
            uint16_t size = uint16_t(launch.group[d]);
            std::memcpy(packet + 4 + 2 * d, &size, 2);
            std::memcpy(packet + 12 + 4 * d, &launch.grid[d], 4);
        }
        launch.kernarg = uint64_t(segment.at);
        std::memcpy(packet + 40, &launch.kernarg, 8);
        launch.packet = uint64_t(packet);
        memory_.add(segment.at, segment.bytes);
        auto begin = std::chrono::steady_clock::now();
        Result result = run(launch, memory_, target_, services_);
        std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
        memory_.remove(segment.at);
        if (result.fault.kind == Fault::none)
            std::printf("ok %llu %llu %.6f\n", static_cast<unsigned long long>(result.instructions),
                        static_cast<unsigned long long>(result.end_ns), seconds.count());
        else
            std::printf("fault %d %s; instruction at 0x%llx\n", int(result.fault.kind),
                        (result.fault.text + ": " + result.fault.executed).c_str(),
                        static_cast<unsigned long long>(result.fault.pc));
        return true;
    }
    bool dump(std::istream &words) {
        std::string name, path;
        words >> name >> path;
        const Buffer &buffer = buffers_.at(name);
        std::ofstream file(path, std::ios::binary);
        for (uint64_t n = 0; n < buffer.parts; ++n)
            file.write(reinterpret_cast<char *>(buffer.at(n)), std::streamsize(buffer.bytes));
        file.close();
        std::printf("ok\n");
        return true;
    }
    bool set(std::istream &words) {
        std::string name;
        uint64_t value = 0;
        words >> name >> value;
        if (name == "threads") target_.threads = uint32_t(value);
        else if (name == "virtual") target_.virtual_clock = value;
        else if (name == "hostile") target_.hostile = value;
        else throw std::runtime_error("unknown setting " + name);
        return true;
    }
    bool choose(std::istream &words) {
        words >> target_.name;
        if (!isa::find_set(target_.name)) throw std::runtime_error("unknown GPU " + target_.name);
        return true;
    }
    bool print_text(std::istream &words) {
        std::string path;
        words >> path;
        std::vector<uint8_t> file = contents(path);
        auto *header = reinterpret_cast<const Elf64_Ehdr *>(file.data());
        auto *sections = reinterpret_cast<const Elf64_Shdr *>(file.data() + header->e_shoff);
        for (unsigned n = 0; n < header->e_shnum; ++n) {
            if (!(sections[n].sh_flags & SHF_EXECINSTR)) continue;
            for (uint64_t at = 0; at + 4 <= sections[n].sh_size;) {
                auto *code = reinterpret_cast<const uint32_t *>(file.data() + sections[n].sh_offset + at);
                isa::Instruction i =
                    isa::decode(*isa::find_set(target_.name), code, sections[n].sh_size - at);
                std::printf("%llx %u %s\n", static_cast<unsigned long long>(sections[n].sh_addr + at), i.size,
                            isa::text(i).c_str());
                at += i.size;
            }
        }
        std::printf("end\n");
        return true;
    }
    bool print_names() {
        std::set<std::string_view> names;
        for (const auto &[name, semantics] : registry(isa::find_set(target_.name)->family))
            names.insert(name);
        for (std::string_view name : names) std::printf("%s\n", std::string(name).c_str());
        std::printf("end\n");
        return true;
    }

    std::map<std::string, std::unique_ptr<CodeObject>> loaded_;
    CodeObject *code_ = nullptr;
    std::map<std::string, Buffer> buffers_;
    std::vector<uint8_t> arguments_;
    ToolMemory memory_;
    ToolServices services_;
    Target target_;
};

}  // namespace

int main() {
    Tool tool;
    std::string line;
    while (std::getline(std::cin, line)) {
        if (line.empty()) continue;
        try {
            tool.command(line);
        } catch (const std::exception &error) {
            std::printf("error %s\n", error.what());
        }
        std::fflush(stdout);
    }
    return 0;
}
