#include "messages.h"

#include <algorithm>
#include <sys/stat.h>

namespace gpubpf {

static bool is_valid(const MapSpec &m) {
    const bool ring = m.place == Place::HostRing || m.place == Place::GpuRing;
    return m.initial.size() <= m.fixed && m.fixed <= kMemoryLimit && m.unit <= Unit::Site &&
           m.place <= Place::Host && (m.place == Place::Gpu || is_shared(m)) &&
           (!ring || (m.per_unit >= 8 && m.per_unit <= 65536 && m.per_unit % 8 == 0));
}

static bool is_valid(const message::KeptMap &kept, const std::vector<MapSpec> &maps) {
    if (!kept.slots) return true;
    if (kept.source >= maps.size() || kept.target >= maps.size()) return false;
    const MapSpec &source = maps[kept.source], &target = maps[kept.target];
    const uint64_t words = source.fixed / kept.slots, element = target.fixed / kept.slots;
    return source.place == Place::Gpu && is_shared(source) && target.place == Place::Shared && words &&
           words % 8 == 0 && source.fixed == words * kept.slots && kept.offset % 8 == 0 && element % 8 == 0 &&
           kept.offset + 8 <= element;
}

static bool is_valid(const Layout &l, size_t maps) {
    const auto is_in_block = [&](uint32_t offset, uint64_t size) {
        return offset == kNoField || offset + size <= l.block.size();
    };
    for (const BlockField &f : l.fields)
        if (f.map >= maps || f.base_offset + uint64_t(8) > l.block.size() ||
            !is_in_block(f.capacity_offset, 8))
            return false;
    for (uint32_t word : {l.pid_tgid, l.kernel, l.epoch, l.tick, l.executions})
        if (!is_in_block(word, 8)) return false;
    return is_in_block(l.shape, kShapeSize) && l.sites <= kSitesLimit && (l.wave == 32 || l.wave == 64) &&
           l.block.size() >= 8 && l.block.size() <= 65536 && l.block_offset <= 65536 &&
           l.parameters.size() <= 65536;
}

bool parse_welcome(Reader &reader, message::Welcome &welcome) {
    Config &config = welcome.config;
    if (!reader.read(welcome) || welcome.version != kProtocolVersion) return false;
    config.sample = std::max<uint64_t>(config.sample, 1);
    welcome.owner.resize(std::min<size_t>(welcome.owner.size(), kOwnerSize - 1));
    return std::all_of(config.maps.begin(), config.maps.end(),
                       [](const MapSpec &m) { return is_valid(m); }) &&
           is_valid(config.kept, config.maps);
}

std::shared_ptr<const Answer> checked_answer(message::Answer &&sent, int image,
                                             const std::vector<MapSpec> &maps) {
    auto answer = std::make_shared<Answer>();
    static_cast<message::Answer &>(*answer) = std::move(sent);
    const uint64_t size = answer->image_size;
    for (const Layout &l : answer->kernels)
        if (!is_valid(l, maps.size())) return nullptr;
    if (size > kImageLimit) return nullptr;
    if (image >= 0 && size) {
        struct stat st;
        if (fstat(image, &st) != 0 || static_cast<uint64_t>(st.st_size) < size) return nullptr;
        answer->image.resize(size + 1);
        if (!read_all(image, answer->image.data(), size, 0)) return nullptr;
    }
    return answer;
}

}  // namespace gpubpf
