// Messages between the agent and the tool: framing, and bounded reading and writing. protocol.py is the other
// side and documents each message. Their numbers are in definitions.py.
//
// A frame is {u32 type, u32 length} and `length` bytes, little endian. A file descriptor may accompany its
// first byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "definitions.h"

namespace gpubpf {

class Writer {
  public:
    Writer &u32(uint32_t v) { return raw(&v, sizeof v); }
    Writer &u64(uint64_t v) { return raw(&v, sizeof v); }
    Writer &text(const std::string &s) {
        u32(static_cast<uint32_t>(s.size()));
        return raw(s.data(), s.size());
    }
    Writer &raw(const void *data, size_t size) {
        const size_t at = bytes.size();
        bytes.resize(at + size);
        if (size) memcpy(bytes.data() + at, data, size);
        return *this;
    }
    std::vector<uint8_t> bytes;
};

// Reads past the end return zeros and clear ok(), so that callers check once, at the end.
class Reader {
  public:
    Reader(const uint8_t *data, size_t size) : next_(data), left_(size) {}
    uint32_t u32();
    uint64_t u64();
    std::string text();
    std::vector<uint8_t> blob();
    // Reads a count of items that take at least `least` bytes each.
    uint32_t count(size_t least);
    bool ok() const { return ok_; }

  private:
    bool take(void *to, size_t size);
    const uint8_t *next_;
    size_t left_;
    bool ok_ = true;
};

struct Frame {
    Message type{};
    std::vector<uint8_t> payload;
    int fd = -1;
};

// Both return false if the other side has closed the connection. `fd`: a file to send along, or -1.
bool send_frame(int socket, Message type, const std::vector<uint8_t> &payload, int fd);
bool receive_frame(int socket, Frame &frame);

// Returns the part behind kFilePrefix of a socket's name, or null.
const char *number_of_file(const char *name);
// Returns the tool's socket, or -1. A name that starts with @ is abstract. fd:N is a descriptor that this
// process already has.
int connect_to_tool(const char *name);
std::string process_name();  // as in /proc/self/comm

// A file descriptor, and whether it is still the agent's: a program may close every descriptor that it finds, and
// reuse the number for its own file.
struct OwnedFile {
    OwnedFile() = default;
    explicit OwnedFile(int descriptor);
    bool is_ours() const;
    int number = -1;
    uint64_t inode = 0;
};

// Creates an anonymous file of `size` zero bytes. Returns a high descriptor, or -1: programs may rely on low
// numbers.
int memory_file(const char *name, uint64_t size);
int sealed_file(const char *name, uint64_t size);  // its size is fixed, so that others can map it
int move_high(int fd);
bool write_all(int fd, const void *data, size_t size, uint64_t offset);
bool read_all(int fd, void *data, size_t size, uint64_t offset);

}  // namespace gpubpf
