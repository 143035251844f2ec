// What a tool sends to the agent. The first byte says which message follows; without one of these, it is a stream of frames.
#include <sys/socket.h>

#include "agent.cpp"
#include "log/host_program.h"

using namespace gpubpf;

static void read_frames(const uint8_t *data, size_t size) {
    int ends[2];
    if (size > 65536 || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return;
    if (write(ends[0], data, size) == static_cast<ssize_t>(size)) {
        shutdown(ends[0], SHUT_WR);
        Frame frame;
        while (receive_frame(ends[1], frame))
            if (frame.payload.size() > kFrameLimit) abort();
    }
    close(ends[0]);
    close(ends[1]);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    const std::vector<uint8_t> payload(data + 1, data + size);  // exactly as long as the message
    Reader reader(payload.data(), payload.size());
    static const bool begun = (registry_lifetime.begin(), true);
    if (!begun) return 0;
    static const int file = memory_file("fuzz", 4096);
    switch (data[0]) {
        case 'W': {
            message::Welcome welcome;
            if (!parse_welcome(reader, welcome)) break;
            for (const MapSpec &map : welcome.config.maps)
                if (map.initial.size() > map.fixed) abort();
            take_host_programs(welcome.config);
            break;
        }
        case 'S': {
            agent.config.maps.resize(4);
            message::Answer sent;
            std::shared_ptr<const Answer> answer =
                reader.read(sent) ? checked_answer(std::move(sent), file, agent.config.maps) : nullptr;
            if (answer && answer->image.size() > 4097) abort();
            break;
        }
        case 'M': take_shared(reader, file); break;
        case 'C': take_consumed(reader); break;
        default: read_frames(data, size);
    }
    host_program_lifetime.end();
    shared_lifetime.end();
    return 0;
}
