// The operation log: one record for each call of the driver that has the GPU do something, in a ring that the tool maps
// (docs/timing.md). Nobody waits for it: what finds no room is counted.
#pragma once

#include <atomic>
#include <cstdint>

namespace gpubpf {

enum class Kind : uint16_t {
  Kernel = 1,
  HtoD = 2,
  DtoH = 3,
  DtoD = 4,
  HtoH = 5,
  Memset = 6,
  Record = 7,
  Wait = 8,
  Graph = 9,
  Sync = 10,
  Api = 11,
  Span = 16,
  Clock = 17,
  Node = 18,
  Edge = 19,
  Fault = 20,
  Queue = 21,
};

enum RecordFlags : uint16_t { kGraphNode = 1, kCallWaits = 2, kCaptured = 4, kHostClock = 8, kFromBefore = 16 };

struct Record {
  uint64_t mark = 0;  // the log's own: position + 1, written last
  uint64_t id = 0;
  Kind kind{};
  uint16_t flags = 0;
  uint32_t thread = 0;
  uint64_t call_ns = 0, return_ns = 0;
  uint64_t stream = 0;
  uint32_t queue = 0, context = 0;
  int32_t result = 0;
  uint32_t stack = 0;
  union {
    uint64_t wide[8] = {};
    uint32_t narrow[16];
  };
};
static_assert(sizeof(Record) == 128, "oplog.py knows this size");

class Log {
 public:
  // Makes the log with room for `records`, a power of two; gives its file, sealed against shrinking, or -1. The caller sends it
  // and closes it. Once in an attachment; a forked child makes its own.
  int open(uint64_t records, bool virtual_clock);
  void forget() { header_ = nullptr; }  // in a forked child: the file is its parent's
  void close();  // at the end of the attachment, when no thread is in a hook
  bool on() const { return header_ != nullptr; }
  void put(const Record &record);  // any thread

 private:
  struct Header;
  Header *header_ = nullptr;
  Record *records_ = nullptr;
  uint64_t capacity_ = 0;
};

extern Log oplog;

// Numbers of operations, unique on the machine: for launches of kernels the first of `n` that follow each other, with no others in
// between (device programs keep arrays by launch number); for everything else the next of their own.
uint64_t take_ids(uint64_t n);
uint64_t other_id();
void new_process();  // the agent starts here, the first time or in a forked child
void number_process(uint64_t number);  // as the tool counts: a process id comes again, after exec and in other namespaces
uint32_t generation_of_process();  // how often it did: what was kept before means nothing
uint32_t process_id();
uint32_t thread_id();  // of the calling thread

}  // namespace gpubpf
