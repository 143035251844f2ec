// Host threads that help with dispatches. They are started when they are first needed, and never end.

#pragma once

#include <cstdint>

namespace hipsim {

class Job {
  public:
    virtual ~Job() = default;
    virtual void work() = 0;  // called by several threads at once; returns when no work is left
};

class Pool {
  public:
    static unsigned cpus();

    // Lets up to `helpers` threads work on a job while this object lives.
    class Shared {
      public:
        Shared(Job &job, unsigned helpers);
        Shared(const Shared &) = delete;
        Shared &operator=(const Shared &) = delete;
        ~Shared() { end(); }
        void end();  // after this, no thread works on the job

      private:
        struct State;
        State *state_ = nullptr;
    };
};

}  // namespace hipsim
