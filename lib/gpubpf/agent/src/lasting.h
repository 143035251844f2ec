#pragma once

namespace gpubpf {

// What threads may use while the process exits: it is never destroyed. And the library is loaded where there is no memory to be had, too.
template <class T>
union Lasting {
    T value;
    Lasting() : value() {}
    ~Lasting() {}
};

}  // namespace gpubpf
