// Messages between the agent and the tool: framing, bounded reading and writing. protocol.py is the other side.
//
// A frame is {u32 type, u32 length} and `length` bytes, little endian; a file descriptor may travel with its first byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpubpf {

constexpr uint32_t kProtocolVersion = 5;
constexpr uint32_t kFrameLimit = 64u << 20;

enum class Message : uint32_t {
  // agent to tool
  Hello = 1,     // + control block
  Image = 2,     // + image. u32 request, u32 compute capability, u32 gpu, u64 size, u32 of how many inputs cuLink made it (0: it did not)
  Name = 3,
  Refused = 4,
  Snapshot = 5,  // + map memory
  Drained = 6,
  Hooked = 7,
  Marker = 8,    // + the file with the host program's stub
  Log = 9,       // + the operation log
  Ring = 10,     // + data file, where that is in host memory
  Stack = 11,    // u32 number, then frames: u32 how many, for each u64 address, u64 address as its file has it, text file, text symbol
  Context = 12,  // u32 serial, u32 gpu, u32 compute capability
  Patches = 13,  // + a list of patches (patch.h), for the tool to put in while the process stands still
  // A module that was loaded before the agent came; answered as an image is. u32 request, u32 compute capability, u32 gpu, u32 flags
  // (1: these are all of its kernels), names of kernels, and of those that were launched: text name, u32 whether the driver tells parameters,
  // of each u32 offset, u32 size; then i32 registers, static shared, const and local bytes, most threads of a block, PTX version, binary
  // version (-1: not told).
  Found = 14,
  // tool to agent
  Welcome = 16,
  Sidecar = 17,  // + image
  Drain = 18,
  Working = 19,  // an image is; said every second
  Shared = 20,   // u32 map, u64 bytes + file; before Welcome
  Consumed = 21,  // of a ring in GPU memory: u32 map, u32 context, then a u64 for each shard
  Patched = 22,   // the patches are in
};

class Writer {
 public:
  Writer &u32(uint32_t v) { return raw(&v, sizeof v); }
  Writer &u64(uint64_t v) { return raw(&v, sizeof v); }
  Writer &text(const std::string &s) {
    u32(static_cast<uint32_t>(s.size()));
    return raw(s.data(), s.size());
  }
  Writer &raw(const void *data, size_t size) {
    const auto *p = static_cast<const uint8_t *>(data);
    bytes.insert(bytes.end(), p, p + size);
    return *this;
  }
  std::vector<uint8_t> bytes;
};

// Reads past the end give zeros and clear ok(): callers check once, at the end.
class Reader {
 public:
  Reader(const uint8_t *data, size_t size) : next_(data), left_(size) {}
  uint32_t u32();
  uint64_t u64();
  std::string text();
  std::vector<uint8_t> blob();
  // A count of items that take at least `least` bytes each.
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

// All return false when the peer is gone. `fd` < 0: none is sent.
bool send_frame(int socket, Message type, const std::vector<uint8_t> &payload, int fd);
bool receive_frame(int socket, Frame &frame);

// An anonymous file of `size` zero bytes, or -1. Moved to a high number: programs that count on low ones keep them.
int memory_file(const char *name, uint64_t size);
int sealed_file(const char *name, uint64_t size);  // whose size never changes, so that others can map it
int move_high(int fd);
bool write_all(int fd, const void *data, size_t size, uint64_t offset);
bool read_all(int fd, void *data, size_t size, uint64_t offset);

}  // namespace gpubpf
