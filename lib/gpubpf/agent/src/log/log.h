// The operation log: one record per driver call that submits work to the GPU, in a ring that the tool maps
// (docs/timing.md). No thread waits for room: if the ring is full, a record is lost and counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "definitions.h"
#include "lifetime.h"

namespace gpubpf {

class Log {
  public:
    // Creates the log with room for `records`, a power of two. Returns its file, sealed against shrinking, or
    // -1. The caller sends the file and closes it. Call it once per attachment; a forked child creates its own.
    int open(uint64_t records, bool virtual_clock);
    void forget() { header_ = nullptr; }  // in a forked child: the file is its parent's
    void close();                         // on detach, when no thread is inside a hook
    bool on() const { return header_ != nullptr; }
    void put(const Record &record);  // any thread

  private:
    LogHeader *header_ = nullptr;
    Record *records_ = nullptr;
    uint64_t capacity_ = 0;
};

extern Log oplog;

// Zeroes the last 64 bytes, whose meaning depends on the kind.
inline void clear_part(Record &record) { memset(record.part, 0, sizeof record.part); }

// Fill in a record of Kind::Api: the name of the call, from hooks[index] unless it is kNoFunction, and the memory that it
// allocates or frees.
void describe_call(Record &record, uint32_t index, const char *name, uint64_t bytes);
inline void describe_memory(Record &record, uint64_t address, uint64_t epoch) {
    record.api.address = address;
    record.api.epoch = static_cast<uint32_t>(epoch);
}

// Return operation numbers, unique in the measurement. take_ids() reserves `n` consecutive numbers for kernel
// launches, and returns the first. No other operation gets one in between, because device programs keep
// arrays by launch number. Everything else uses other_id(), which has its own range.
uint64_t take_ids(uint64_t n);
uint64_t next_launch_id();  // what take_ids() will return next
uint64_t other_id();
extern const Lifetime log_lifetime;
// `number` is the tool's. A process id is not unique: it survives exec, and repeats in other namespaces.
void number_process(uint64_t number);
// Increases with each start of the agent. Values that were cached under an earlier generation are invalid.
uint32_t generation_of_process();
uint32_t process_id();
uint32_t thread_id();  // of the calling thread

}  // namespace gpubpf
