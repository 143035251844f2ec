// Memory and events that several processes share (cuIpc*).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace cudasim::driver {

struct Context;

// The records of an interprocess event, in memory of all processes that have opened it. A record is a number; those up to `done` are
// done.
class SharedEvent {
  public:
    static std::shared_ptr<SharedEvent> create();        // null: no memory
    static std::shared_ptr<SharedEvent> open(int file);  // takes the file; null: not the file of an event
    SharedEvent(const SharedEvent &) = delete;
    SharedEvent &operator=(const SharedEvent &) = delete;
    ~SharedEvent();

    uint64_t begin_record();  // returns the number of a new record
    void finish_record(uint64_t number);
    uint64_t last_record() const { return state_->recorded.load(); }
    // Returns whether a record is done. It counts as done if the process that recorded last has ended.
    bool done(uint64_t number) const;
    // Waits for a record, or until `context` is destroyed.
    void wait(uint64_t number, const Context &context) const;
    int file() const { return file_; }

  private:
    struct State {
        std::atomic<uint64_t> recorded, done;
        std::atomic<int32_t> recorder;  // process that recorded last
    };
    SharedEvent(int file, State *state) : file_(file), state_(state) {}
    static std::shared_ptr<SharedEvent> map(int file);

    int file_;
    State *state_;
};

}  // namespace cudasim::driver
