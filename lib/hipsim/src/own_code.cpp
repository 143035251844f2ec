#include <algorithm>
#include <cctype>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "own_code.h"

namespace hipsim {
namespace {

constexpr std::string_view kTarget = "-amdgcn-amd-amdhsa-";  // in a fat binary's list, before the GPU

std::set<std::string> gpus_in(std::string_view file) {
    std::set<std::string> found;
    while (void *at = memmem(file.data(), file.size(), kTarget.data(), kTarget.size())) {
        file.remove_prefix(static_cast<size_t>(static_cast<char *>(at) - file.data()) + kTarget.size());
        size_t begin = std::min(file.find_first_not_of('-'), file.size()), end = begin;
        while (end < file.size() && isalnum(static_cast<unsigned char>(file[end])) != 0) end++;
        if (end - begin <= 3 || file.substr(begin, 3) != "gfx") continue;
        for (std::string_view feature : {":sramecc", ":xnack"}) {
            size_t sign = end + feature.size();
            bool has = file.substr(end, feature.size()) == feature && sign < file.size();
            if (has && (file[sign] == '+' || file[sign] == '-')) end = sign + 1;
        }
        found.emplace(file.substr(begin, end - begin));
    }
    return found;
}

}  // namespace

std::set<std::string> gpus_of_program() {
    std::set<std::string> found;
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (file < 0) return found;
    struct stat status{};
    if (fstat(file, &status) == 0 && status.st_size > 0) {
        size_t size = static_cast<size_t>(status.st_size);
        void *content = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
        if (content != MAP_FAILED) {
            found = gpus_in({static_cast<char *>(content), size});
            munmap(content, size);
        }
    }
    close(file);
    return found;
}

}  // namespace hipsim
