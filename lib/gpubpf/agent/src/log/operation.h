// An operation of the program, from before the driver's call to its record in the log.
#pragma once

#include "driver/stream.h"
#include "log/log.h"
#include "state.h"

namespace gpubpf {

// A stream with a number, because its handle may later stand for another stream. There is one legacy default
// stream per context, and one per-thread default stream per context and thread.
struct Queue {
    uint32_t number = 0;         // from 1; 0: unknown
    Context *context = nullptr;  // null: unknown
};
Queue queue_of(StreamRef where);     // never throws; logs a queue that is new
void new_stream(CUstream stream);    // the stream was just created, so its history is known
void forget_queue(CUstream stream);  // before the stream is destroyed
void forget_queues(const Context *context);

// Remember which operation recorded an event last. 0: unknown.
void event_recorded(CUevent event, uint64_t id);
uint64_t recorded_by(CUevent event);
void forget_event(CUevent event);

extern const Lifetime operation_lifetime;

void describe_call(Record &record, size_t index, uint64_t bytes);  // of hooks[index]

class Stamp;

class Operation {
  public:
    Operation(Kind kind, StreamRef where, uint16_t flags) noexcept;
    // Runs the programs at operations, before the call. Does nothing during a capture, because the operation
    // does not happen then. The second form is for operations whose record has no fields of a copy or memset.
    void announce() noexcept;
    void announce(uint64_t bytes, uint64_t destination, uint64_t source) noexcept;
    // Makes CUPTI record the operation, puts timing events around it, or both, if the tool wants times. Several
    // copies in one call (`batch`) have several CUPTI records, so timing events time them as one.
    void time(bool batch = false) noexcept;
    void called() noexcept;  // the driver's call comes next
    void returned(CUresult result) noexcept;
    // Does nothing if the attachment ended during the call.
    void log() noexcept {
        if (!over_) oplog.put(record);
    }

    Record record;
    Queue queue;

  private:
    StreamRef where_;
    Stamp *stamp_ = nullptr;
    bool recorded_ = false;  // recorded by CUPTI, perhaps also by timing events
    bool over_ = false;
};

}  // namespace gpubpf
