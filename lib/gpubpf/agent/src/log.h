// The operation log: one record for each call of the driver that has the GPU do something, in a ring that the tool maps
// (docs/timing.md). Nobody waits for it: what finds no room is counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "definitions.h"
#include "lifetime.h"

namespace gpubpf {

class Log {
  public:
    // Makes the log with room for `records`, a power of two; gives its file, sealed against shrinking, or -1. The caller sends it
    // and closes it. Once in an attachment; a forked child makes its own.
    int open(uint64_t records, bool virtual_clock);
    void forget() { header_ = nullptr; }  // in a forked child: the file is its parent's
    void close();                         // at the end of the attachment, when no thread is in a hook
    bool on() const { return header_ != nullptr; }
    void put(const Record &record);  // any thread

  private:
    struct Header;
    Header *header_ = nullptr;
    Record *records_ = nullptr;
    uint64_t capacity_ = 0;
};

extern Log oplog;

// Its last 64 bytes, whose meaning depends on the kind, are 0 again.
inline void clear_part(Record &record) { memset(record.part, 0, sizeof record.part); }

// Numbers of operations, unique on the machine: for launches of kernels the first of `n` that follow each other, with no others in
// between (device programs keep arrays by launch number); for everything else the next of their own.
uint64_t take_ids(uint64_t n);
uint64_t other_id();
extern const Lifetime log_lifetime;
void number_process(
    uint64_t number);  // as the tool counts: a process id comes again, after exec and in other namespaces
uint32_t generation_of_process();  // how often it did: what was kept before means nothing
uint32_t process_id();
uint32_t thread_id();  // of the calling thread

}  // namespace gpubpf
