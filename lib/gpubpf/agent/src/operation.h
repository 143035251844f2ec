// An operation of the program, from before the driver's call to its record in the log.
#pragma once

#include "log.h"
#include "state.h"

namespace gpubpf {

// A stream as a call names it. `per_thread`: null means the calling thread's own default stream. `any`: the call names none, and
// puts nothing into one.
struct Where {
    CUstream given = nullptr;
    bool per_thread = false;
    bool any = false;
    CUstream handle() const { return !given && per_thread ? CU_STREAM_PER_THREAD : given; }
};

constexpr Where kNoStream{nullptr, false, true};

// A stream has a number: its handle can be another stream's afterwards. The legacy default stream has one for each context, a
// per-thread default stream one for each context and thread.
struct Queue {
    uint32_t number = 0;         // from 1; 0: not known
    Context *context = nullptr;  // null: not known
};
Queue queue_of(Where where);         // never throws; logs the queue when it is new
void new_stream(CUstream stream);    // it was made just now: what it holds is known
void forget_queue(CUstream stream);  // before it is destroyed
void forget_queues(const Context *context);

// The operation that recorded an event last; 0: not known.
void event_recorded(CUevent event, uint64_t id);
uint64_t recorded_by(CUevent event);
void forget_event(CUevent event);

extern const Lifetime operation_lifetime;

// Fills in a record of Kind::Api: a call by its name, of hooks[index] or of none; what it allocates or frees.
void describe_call(Record &record, uint32_t index, const char *name, uint64_t bytes);
void describe_call(Record &record, size_t index, uint64_t bytes);
void describe_memory(Record &record, uint64_t address, uint64_t epoch);

bool capturing(CUstream stream);  // what is put into it goes into a graph

class Stamp;

class Operation {
  public:
    Operation(Kind kind, Where where, uint16_t flags) noexcept;
    // Before the call: runs the programs at operations. Nothing in a capture, where no operation happens. The second: of what has no copy's
    // or memset's fields in its record.
    void announce() noexcept;
    void announce(uint64_t bytes, uint64_t destination, uint64_t source) noexcept;
    void time() noexcept;    // has timing events put around it, where the tool wants them
    void called() noexcept;  // now comes the driver's call
    void returned(CUresult result) noexcept;
    // Nothing where the attachment ended during the call.
    void log() noexcept {
        if (!over_) oplog.put(record);
    }

    Record record;
    Queue queue;

  private:
    Where where_;
    Stamp *stamp_ = nullptr;
    bool recorded_ = false;  // by CUPTI
    bool over_ = false;
};

}  // namespace gpubpf
