#include "wire.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "peer.h"

namespace gpubpf {

void Reader::raw(void *to, size_t size) {
    if (size > left_) {
        ok_ = false;
        left_ = 0;
        memset(to, 0, size);
        return;
    }
    if (size) memcpy(to, next_, size);
    next_ += size;
    left_ -= size;
}

bool send_frame(int socket, Message type, const std::vector<uint8_t> &payload, int fd) {
    uint32_t header[2] = {static_cast<uint32_t>(type), static_cast<uint32_t>(payload.size())};
    iovec parts[2] = {{header, sizeof header}, {const_cast<uint8_t *>(payload.data()), payload.size()}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    while (message.msg_iovlen) {
        ssize_t n = sendmsg(socket, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;  // sends have a timeout: a tool that does not read counts as exited
        message.msg_control = nullptr;
        message.msg_controllen = 0;
        auto sent = static_cast<size_t>(n);
        while (message.msg_iovlen && sent >= message.msg_iov->iov_len) {
            sent -= message.msg_iov->iov_len;
            ++message.msg_iov;
            --message.msg_iovlen;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = static_cast<char *>(message.msg_iov->iov_base) + sent;
            message.msg_iov->iov_len -= sent;
        }
    }
    return true;
}

static bool receive_exactly(int socket, void *to, size_t size, int *fd) {
    auto *p = static_cast<char *>(to);
    while (size) {
        iovec part{p, size};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
        if (fd) {
            message.msg_control = control;
            message.msg_controllen = sizeof control;
        }
        ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        if (fd)
            for (cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
                if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
                    memcpy(fd, CMSG_DATA(c), sizeof *fd);
        p += n;
        size -= static_cast<size_t>(n);
    }
    return true;
}

bool receive_frame(int socket, Frame &frame) {
    uint32_t header[2];
    frame.fd = -1;
    if (!receive_exactly(socket, header, sizeof header, &frame.fd) || header[1] > kFrameLimit) return false;
    frame.type = static_cast<Message>(header[0]);
    frame.payload.resize(header[1]);
    return header[1] == 0 || receive_exactly(socket, frame.payload.data(), header[1], nullptr);
}

int move_high(int fd) {
    if (fd < 0) return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 200);
    if (high < 0) return fd;
    close(fd);
    return high;
}

// Whether a file may become this large. If not, the attempt would kill the program (SIGXFSZ).
static bool may_become(uint64_t size) {
    rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && size <= limit.rlim_cur;
}

int memory_file(const char *name, uint64_t size) {
    if (!may_become(size)) return -1;
    int fd = move_high(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

void make_holes(int file, const char *bytes, uint64_t from, uint64_t size) {
    constexpr uint64_t kPage = 4096, kPart = 16 * kPage;
    auto empty = [&](uint64_t at) { return !bytes[at] && !memcmp(bytes + at, bytes + at + 1, kPart - 1); };
    const uint64_t until = from + size;
    for (uint64_t at = (from + kPage - 1) & ~(kPage - 1); at + kPart <= until;) {
        uint64_t end = at;
        while (end + kPart <= until && empty(end)) end += kPart;
        if (end > at)
            fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                      static_cast<off_t>(end - at));
        at = end + kPart;
    }
}

int sealed_file(const char *name, uint64_t size) {
    int fd = memory_file(name, size);
    if (fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

// Calls pread or pwrite until all bytes have been transferred.
template <class Call, class Byte>
static bool transfer_all(Call call, int fd, Byte *p, size_t size, uint64_t offset) {
    while (size) {
        ssize_t n = call(fd, p, size, static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        p += n;
        offset += static_cast<uint64_t>(n);
        size -= static_cast<size_t>(n);
    }
    return true;
}

bool write_all(int fd, const void *data, size_t size, uint64_t offset) {
    return may_become(offset + size) &&
           transfer_all(pwrite, fd, static_cast<const char *>(data), size, offset);
}

bool read_all(int fd, void *data, size_t size, uint64_t offset) {
    return transfer_all(pread, fd, static_cast<char *>(data), size, offset);
}

const char *number_of_file(const char *name) {
    constexpr size_t kLength = sizeof kFilePrefix - 1;
    return strncmp(name, kFilePrefix, kLength) == 0 ? name + kLength : nullptr;
}

static uint64_t inode_of(int fd) {
    struct stat st;
    return fd >= 0 && fstat(fd, &st) == 0 ? st.st_ino : 0;
}

OwnedFile::OwnedFile(int descriptor) : number(descriptor), inode(inode_of(descriptor)) {}

bool OwnedFile::is_ours() const { return inode && inode_of(number) == inode; }

int connect_to_tool(const char *name) {
    timeval bound{5, 0};
    if (const char *number = number_of_file(name)) {
        const int given = move_high(atoi(number));
        setsockopt(given, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound);
        return given;
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    size_t length = strlen(name);
    if (!length || length >= sizeof address.sun_path) return -1;
    memcpy(address.sun_path, name, length);
    if (name[0] == '@') address.sun_path[0] = '\0';
    int fd = move_high(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound);  // also limits connect()
    auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length + (name[0] != '@'));
    if (connect(fd, reinterpret_cast<sockaddr *>(&address), size) != 0 || !is_own_user_or_root(fd)) {
        close(fd);
        return -1;
    }
    return fd;
}

std::string process_name() {
    char name[32] = {};
    int fd = move_high(open("/proc/self/comm", O_RDONLY | O_CLOEXEC));
    if (fd < 0) return "";
    ssize_t n = read(fd, name, sizeof name - 1);
    close(fd);
    std::string s(name, n > 0 ? static_cast<size_t>(n) : 0);
    if (!s.empty() && s.back() == '\n') s.pop_back();
    return s;
}

}  // namespace gpubpf
