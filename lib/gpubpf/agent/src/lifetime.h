// The lifetime of the agent's state: who creates it, who frees it, and what a forked child does with it.
//
// A file that keeps state defines one Lifetime next to it. lifetimes.cpp lists them all in one table, which
// sets their order.
#pragma once

#include <new>

namespace gpubpf {

// What one file does at the stages of an attachment. A null function means that there is nothing to do.
struct Lifetime {
    void (*begin)();  // An attachment starts. No hook is in place yet.
    // The agent has detached, and no thread is inside a hook. Joins threads, while the tool is still
    // connected.
    void (*stop)();
    void (*end)();  // After every stop(): frees what belongs to the attachment.
    // fork() has returned in the child. Only the calling thread exists there, and its parent's threads may
    // have held any lock. So this frees nothing and waits for no lock: it abandons the parent's state.
    void (*in_forked_child)();
};

void begin_state();          // in the table's order
void stop_state() noexcept;  // in reverse order
void end_state() noexcept;   // in reverse order
void abandon_state();        // in the table's order

// A static object without a destructor: threads may still use it while the process exits. It needs no
// allocation, because the library must also load when there is no memory left.
template <class T>
union NeverDestroyed {
    T value;
    NeverDestroyed() : value() {}
    ~NeverDestroyed() {}
};

// State that belongs to one attachment. Access is one load of a pointer. A forked child leaves the pointer
// alone: the fork may have interrupted code that uses it. The next begin() in the child replaces it.
template <class T>
class AttachmentState {
  public:
    void begin() { state_ = new T; }
    void end() {
        delete state_;
        state_ = nullptr;
    }
    T *operator->() const { return state_; }
    T &operator*() const { return *state_; }

  private:
    T *state_ = nullptr;
};

// State that outlives attachments, because the agent's threads that use it may outlive them. Access is one
// load of a pointer. A forked child starts with fresh state. The parent's may be locked, and may refer to
// threads that do not exist in the child.
template <class T>
class ProcessState {
  public:
    void in_forked_child() noexcept {
        if (T *fresh = new (std::nothrow) T) state_ = fresh;
    }
    T *operator->() const { return state_; }
    T &operator*() const { return *state_; }

  private:
    NeverDestroyed<T> first_;
    T *state_ = &first_.value;
};

// The Lifetime of a file whose only state is one object.
template <auto &state>
constexpr Lifetime lifetime_of_attachment_state() {
    return {[] { state.begin(); }, nullptr, [] { state.end(); }, nullptr};
}

template <auto &state>
constexpr Lifetime lifetime_of_process_state() {
    return {nullptr, nullptr, nullptr, [] { state.in_forked_child(); }};
}

}  // namespace gpubpf
