// The cache of an embedded device (of cudasim: translations; of hipsim: code objects), and a directory for the files of one translation.
// A cached file has a digest, and is used only if no other user but root can have written it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace embedded {

// The device's name: cudasim or hipsim. Each library defines it. Its cache is $CUDASIM_CACHE or $HIPSIM_CACHE, else a directory of
// that name beside those of gpubpf's tools.
extern const char *const kDevice;

// Returns the content that was stored under a name. Returns nothing if the file is missing, is damaged, has another version's format,
// was stored under another name, or could have been changed by another user.
std::optional<std::string> read_cached(const std::string &name);

// Stores `content` under a name, and replaces a previous file. Readers see all of it or nothing. Returns whether that succeeded;
// without a usable directory or space, nothing is stored.
bool write_cached(const std::string &name, std::string_view content);

// Returns the path of a file in the cache, empty without a usable directory.
std::string cached_path(const std::string &name);

// A private directory for the files of one run of the translator. It is removed with its files.
class ScratchDirectory {
  public:
    ScratchDirectory();
    ScratchDirectory(const ScratchDirectory &) = delete;
    ScratchDirectory &operator=(const ScratchDirectory &) = delete;
    ~ScratchDirectory();
    const std::string &path() const { return path_; }  // empty: nowhere to write
    // Return false or nothing if the file cannot be written or read.
    bool write(const std::string &name, std::string_view content) const;
    std::optional<std::string> read(const std::string &name) const;

  private:
    std::string path_;
};

// Returns the value of an environment variable, "" if it is not set.
std::string variable(const char *name);

bool write_all(int file, std::string_view content);

}  // namespace embedded
