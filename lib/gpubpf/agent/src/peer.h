// Who listens at the tool's socket. When the tool has ended, anybody can listen there. Included from C (device_times/ring.c), too.
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

// User IDs that a user namespace does not have look like this one. Elsewhere, it is the user nobody.
#define OVERFLOW_USER 65534u

// Whether OVERFLOW_USER stands for no user of this user namespace.
static inline bool has_no_overflow_user(void) {
    FILE *map = fopen("/proc/self/uid_map", "re");
    if (!map) return false;
    bool found = false;
    unsigned first, outside, count;
    while (fscanf(map, "%u %u %u", &first, &outside, &count) == 3)
        if (first <= OVERFLOW_USER && OVERFLOW_USER - first < count) found = true;
    bool whole = feof(map);
    fclose(map);
    return whole && !found;
}

// Whether this process's user or root listens at the other end of a connected socket. That may be root outside of the user namespace.
static inline bool is_own_user_or_root(int file) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(file, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
    return peer.uid == geteuid() || peer.uid == 0 || (peer.uid == OVERFLOW_USER && has_no_overflow_user());
}
