#include "messages.h"

#include <algorithm>
#include <sys/stat.h>

namespace gpubpf {

bool parse_welcome(Reader &r, Config &config) {
    config = Config();  // a forked child still has its parent's
    if (r.u32() != kProtocolVersion) return false;
    config.map_memory = r.u64();
    config.first = r.u64();
    config.last = r.u64();
    config.sample = std::max<uint64_t>(r.u64(), 1);
    config.image_wait_ms = r.u32();
    const uint32_t flags = r.u32();
    config.memory_is_zero = flags & kMemoryIsZero;
    config.stamps = flags & kStamps;
    config.stacks = flags & kStacks;
    config.allocation_stacks = flags & kAllocationStacks;
    config.graphs = flags & kGraphs;
    config.match_all = flags & kMatchAll;
    config.budget = flags & kBudget;
    config.log_records = r.u64();
    config.pump = r.u64();
    config.process = r.u64();
    config.owner = r.text().substr(0, kOwnerSize - 1);
    uint32_t n = r.count(28);
    for (uint32_t i = 0; i < n; ++i) {
        MapSpec m;
        m.fixed = r.u64();
        m.per_unit = r.u64();
        m.unit = static_cast<Unit>(r.u32());
        m.place = static_cast<Place>(r.u32());
        m.initial = r.blob();
        const bool ring = m.place == Place::HostRing || m.place == Place::GpuRing;
        if (m.initial.size() > m.fixed || m.fixed > kMemoryLimit || m.unit > Unit::Site ||
            m.place > Place::Host || (m.place != Place::Gpu && !m.shared()) ||
            (ring && (m.per_unit < 8 || m.per_unit > 65536 || m.per_unit % 8)))
            return false;
        config.maps.push_back(std::move(m));
    }
    Kept &kept = config.kept;
    kept = {r.u32(), r.u32(), r.u32(), r.u32()};
    if (kept.slots) {
        if (kept.source >= config.maps.size() || kept.target >= config.maps.size()) return false;
        const MapSpec &source = config.maps[kept.source], &target = config.maps[kept.target];
        const uint64_t words = source.fixed / kept.slots, element = target.fixed / kept.slots;
        if (source.place != Place::Gpu || !source.shared() || target.place != Place::Shared || !words ||
            words % 8 || source.fixed != words * kept.slots || kept.offset % 8 || element % 8 ||
            kept.offset + 8 > element)
            return false;
    }
    n = r.count(8);
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t cc = r.u32();
        config.clock_kernels.emplace_back(cc, r.blob());
    }
    return r.ok();
}

std::shared_ptr<const Answer> parse_answer(Reader &reader, int image, const std::vector<MapSpec> &maps) {
    auto answer = std::make_shared<Answer>();
    uint64_t size = reader.u64();
    uint32_t n = reader.count(64);
    for (uint32_t i = 0; i < n && reader.ok(); ++i) {
        Layout l;
        l.name = reader.text();
        l.limited = reader.text();
        l.sizes.resize(reader.count(4));
        for (uint32_t &bytes : l.sizes) bytes = reader.u32();
        l.block_offset = reader.u32();
        l.pid_tgid = reader.u32();
        l.waits = reader.u32() != 0;
        l.sites = reader.u32();
        l.build = reader.u32();
        l.kernel = reader.u32();
        l.epoch = reader.u32();
        l.shape = reader.u32();
        l.tick = reader.u32();
        l.executions = reader.u32();
        l.wave = reader.u32();
        l.compute_units = reader.u32();
        l.most_threads = reader.u32();
        l.original_threads = reader.u32();
        l.patched = reader.u32() != 0;
        l.block = reader.blob();
        uint32_t fields = reader.count(12);
        for (uint32_t f = 0; f < fields; ++f) {
            BlockField b{reader.u32(), 0, 0};
            b.base_offset = reader.u32();
            b.capacity_offset = reader.u32();
            if (b.map >= maps.size() || b.base_offset + uint64_t(8) > l.block.size() ||
                (b.capacity_offset != kNoField && b.capacity_offset + uint64_t(8) > l.block.size()))
                return nullptr;
            l.fields.push_back(b);
        }
        for (uint32_t word : {l.pid_tgid, l.kernel, l.epoch, l.tick, l.executions})
            if (word != kNoField && word + uint64_t(8) > l.block.size()) return nullptr;
        if (l.shape != kNoField && l.shape + kShapeSize > l.block.size()) return nullptr;
        l.references.resize(reader.count(16));
        for (CodeReference &r : l.references) {
            r.place = static_cast<int64_t>(reader.u64());
            r.distance = reader.u64();
        }
        if (l.sites > kSitesLimit || (l.wave != 32 && l.wave != 64)) return nullptr;
        if (l.block.size() < 8 || l.block.size() > 65536 || l.block_offset > 65536 || l.sizes.size() > 65536)
            return nullptr;
        answer->kernels.push_back(std::move(l));
    }
    n = reader.count(8);
    for (uint32_t i = 0; i < n && reader.ok(); ++i) {
        std::string name = reader.text();
        answer->refusals.emplace_back(std::move(name), reader.text());
    }
    n = reader.count(24);
    for (uint32_t i = 0; i < n && reader.ok(); ++i) {
        Variable v;
        v.name = reader.text();
        v.index = reader.u32();
        v.copied = reader.u32() != 0;
        v.entry = reader.u32();
        v.refusal = reader.text();
        uint32_t kernels = reader.count(4);
        for (uint32_t k = 0; k < kernels; ++k) v.kernels.push_back(reader.text());
        answer->variables.push_back(std::move(v));
    }
    n = reader.count(8);
    for (uint32_t i = 0; i < n && reader.ok(); ++i) {
        std::string name = reader.text();
        answer->launched.emplace_back(std::move(name), reader.text());
    }
    for (std::vector<std::string> *names : {&answer->later, &answer->first}) {
        n = reader.count(4);
        for (uint32_t i = 0; i < n && reader.ok(); ++i) names->push_back(reader.text());
    }
    n = reader.count(8);
    for (uint32_t i = 0; i < n && reader.ok(); ++i) {
        const uint32_t instruction = reader.u32();
        answer->patches.emplace_back(instruction, reader.text());
    }
    if (!reader.ok() || size > kImageLimit) return nullptr;
    if (image >= 0 && size) {
        struct stat st;
        if (fstat(image, &st) != 0 || static_cast<uint64_t>(st.st_size) < size) return nullptr;
        answer->image.resize(size + 1);
        if (!read_all(image, answer->image.data(), size, 0)) return nullptr;
    }
    return answer;
}

}  // namespace gpubpf
