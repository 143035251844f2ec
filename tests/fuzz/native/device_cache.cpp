// A file in the embedded device's cache: what is read has its digest behind it, or nothing is read. A fuzzer sees the digest that
// the reader compares with, so it can make such files.
#ifdef __clang__  // some versions do not know the name "sha"
#define __builtin_cpu_supports(feature) false
#endif
#include "embedded/cache.cpp"

const char *const embedded::kDevice = "cudasim";

static const std::string &folder() {
    static char name[] = "/tmp/cudasim-fuzz-XXXXXX";
    static const std::string made = mkdtemp(name);
    static const bool set = setenv("CUDASIM_CACHE", name, 1) == 0 && atexit([] {
                                std::error_code ignored;
                                std::filesystem::remove_all(name, ignored);
                            }) == 0;
    if (!set) abort();
    return made;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const std::string path = folder() + "/module";
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) abort();
    close(file);
    const std::optional<std::string> found = embedded::read_cached("module");
    if (!found) return 0;
    const embedded::Sha256::Digest digest = embedded::digest("module", *found);
    std::string stored = *found;
    stored.append(reinterpret_cast<const char *>(digest.data()), digest.size());
    stored += embedded::kMark;
    if (stored.compare(0, stored.npos, reinterpret_cast<const char *>(data), size) != 0) abort();
    return 0;
}
