// Tensor memory and the multiplications that use it (PTX ISA 9.7.16).
//
// Each block has 128 lanes of 512 columns of 32 bits. Everything is done at once, so waiting never blocks. A pair of blocks
// (.cta_group::2) multiplies in one step, because one host thread runs all blocks of a cluster.
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/internal.h"

namespace cudasim {
namespace {

#ifdef __ARM_FP16_FORMAT_IEEE
using Half = __fp16;  // GCC 12 has no _Float16 in C++ for aarch64
#else
using Half = _Float16;
#endif

constexpr uint32_t kLanes = 128, kColumns = 512,
                   kUnit = 32;   // a unit: the columns that are allocated together
constexpr uint32_t kChunk = 16;  // bytes that lie together in every layout

enum class Type { f16, bf16, tf32, e4m3, e5m2, e2m3, e3m2, e2m1, s8, u8 };

Block &block_of(cs_warp *w) { return *static_cast<Block *>(w->block); }

[[noreturn]] void refuse(cs_warp *w, const char *why) {
    raise_fault(w, CS_FAULT_ILLEGAL_INSTRUCTION, 0, 0, 0, why);
}

// The blocks that take part: the block itself, or both blocks of its pair in the order of their ranks.
struct Pair {
    Block *blocks[2];
    uint32_t count;
};

Pair pair_of(cs_warp *w, bool both) {
    Block &block = block_of(w);
    if (!both) return {{&block, nullptr}, 1};
    const uint32_t first = block.rank & ~1u;
    if (first + 1 >= block.job->cluster_blocks)
        refuse(w, ".cta_group::2 requires a cluster of pairs of blocks");
    return {{&block.leader->member(first), &block.leader->member(first + 1)}, 2};
}

uint32_t &cell(cs_warp *w, Block &block, uint32_t lane, uint32_t column) {
    if (lane >= kLanes || column >= kColumns || !(block.tensor_units >> column / kUnit & 1))
        raise_fault(w, CS_FAULT_ILLEGAL_ADDRESS, lane << 16 | column, 4, 'a',
                    "this tensor memory is not allocated");
    return reinterpret_cast<uint32_t *>(
        block.tensor.reserve(kLanes * kColumns * 4))[lane * kColumns + column];
}

uint32_t units(cs_warp *w, uint32_t columns) {
    if (columns < kUnit || columns > kColumns || columns & (columns - 1))
        refuse(w, "tensor memory is allocated in powers of two from 32 to 512 columns");
    return columns / kUnit;
}

uint32_t allocate(cs_warp *w, uint32_t columns) {
    Block &block = block_of(w);
    const uint32_t count = units(w, columns), mask = (1u << count) - 1;
    for (uint32_t first = 0; first < kColumns / kUnit; first += count) {
        if (block.tensor_units & mask << first) continue;
        block.tensor_units |= mask << first;
        for (uint32_t lane = 0; lane < kLanes;
             lane++)  // PTX leaves the contents open: NaNs show what was never written
            memset(&cell(w, block, lane, first * kUnit), 0xff, size_t{columns} * 4);
        return first * kUnit;
    }
    refuse(w, "the block has not as many free columns of tensor memory");
}

void release(cs_warp *w, uint32_t address, uint32_t columns) {
    Block &block = block_of(w);
    const uint32_t mask = (1u << units(w, columns)) - 1, first = address / kUnit;
    if (address % columns || address >= kColumns || (block.tensor_units >> first & mask) != mask)
        refuse(w, "this tensor memory was not allocated");
    block.tensor_units &= ~(mask << first);
}

// tcgen05.ld and tcgen05.st: a warp has the 32 lanes of its number modulo 4.
void move(cs_warp *w, const cs_tensor_memory &q) {
    Block &block = block_of(w);
    const bool stores = q.operation == CS_TMEM_STORE;
    const uint32_t per = q.shape == CS_TMEM_16X256B ? 4 : q.shape == CS_TMEM_16X128B ? 2 : 1;
    const uint32_t rows = q.shape == CS_TMEM_32X32B ? 32 : 16;
    for (uint32_t r = 0; r < per * q.count; r++)
        for (uint32_t l = 0; l < 32; l++) {
            uint32_t row = l, column = r, at = q.address;
            switch (q.shape) {
                case CS_TMEM_16X64B: row = (l & 1) * 8 + (l >> 2), column = (l >> 1 & 1) + 2 * r; break;
                case CS_TMEM_16X128B: row = l / 4 + r % 2 * 8, column = l % 4 + r / 2 * 4; break;
                case CS_TMEM_16X256B:
                    row = l / 4 + r / 2 % 2 * 8, column = l % 4 * 2 + r % 2 + r / 4 * 8;
                    break;
                case CS_TMEM_16X32BX2: row = l % 16, at += l < 16 ? 0 : q.split; break;
                default: break;
            }
            const uint32_t first = at >> 16;
            if (first / 32 != w->warpid % 4 || first % rows)
                refuse(w, "a warp accesses the 32 lanes of tensor memory of its number modulo 4");
            const uint32_t lane = first + row, from = at & 0xffff;
            if (!q.packed) {
                uint32_t &x = cell(w, block, lane, from + column);
                if (stores) x = q.registers[r][l];
                else q.registers[r][l] = x;
                continue;
            }
            uint32_t &low = cell(w, block, lane, from + 2 * column);
            uint32_t &high = cell(w, block, lane, from + 2 * column + 1);
            if (stores) low = q.registers[r][l] & 0xffff, high = q.registers[r][l] >> 16;
            else q.registers[r][l] = (low & 0xffff) | high << 16;
        }
}

// A matrix in shared memory, as a descriptor has it (9.7.16.4.1). `turned`: M or N is contiguous, not K.
class Shared {
  public:
    Shared(cs_warp *w, uint64_t descriptor, bool turned) : w_(w), turned_(turned) {
        start_ = (descriptor & 0x3fff) << 4;
        leading_ = (descriptor >> 16 & 0x3fff) << 4;
        stride_ = (descriptor >> 32 & 0x3fff) << 4;
        switch (descriptor >> 61) {
            case 0: break;
            case 2: width_ = 128, pattern_ = 7; break;
            case 4: width_ = 64, pattern_ = 3; break;
            case 6: width_ = 32, pattern_ = 1; break;
            default: refuse(w, "the embedded device does not have this swizzle of a matrix descriptor");
        }
        if (descriptor >> 49 & 15)
            refuse(w, "the embedded device has no base offset and no absolute stride of matrix descriptors");
    }
    // Returns chunk `c` along the contiguous direction, of line `line` in the other direction.
    const uint8_t *chunk(Block &block, uint32_t c, uint32_t line) const {
        const uint32_t size = block.job->shared_size;
        uint32_t at = start_;
        if (!turned_) at += line / 8 * stride_ + line % 8 * width_ + (pattern_ ? c * kChunk : c * leading_);
        else if (!pattern_) at += c * stride_ + line % 8 * kChunk + line / 8 * leading_;
        else
            at +=
                c * kChunk / width_ * leading_ + c * kChunk % width_ + line % 8 * width_ + line / 8 * stride_;
        at ^= (at >> 7 & pattern_) << 4;
        if (at + kChunk > size)
            raise_fault(w_, CS_FAULT_ILLEGAL_ADDRESS, w_->shared_window + at, kChunk, 'r', nullptr);
        return block.shared.reserve(size) + at;
    }

  private:
    cs_warp *w_;
    bool turned_;
    uint32_t start_, leading_, stride_, width_ = kChunk, pattern_ = 0;
};

uint32_t bits_of(Type type) {  // of an element in shared memory
    switch (type) {
        case Type::f16:
        case Type::bf16: return 16;
        case Type::tf32: return 32;
        case Type::e2m3:
        case Type::e3m2: return 6;
        case Type::e2m1: return 4;
        default: return 8;
    }
}

double small_float(uint32_t code, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const auto exponent = static_cast<int>(code >> fraction_bits & ((1u << exponent_bits) - 1));
    const uint32_t fraction = code & ((1u << fraction_bits) - 1);
    const double size = exponent
                            ? std::ldexp(fraction + (1u << fraction_bits), exponent - bias - fraction_bits)
                            : std::ldexp(fraction, 1 - bias - fraction_bits);
    return code >> (exponent_bits + fraction_bits) & 1 ? -size : size;
}

double half(uint32_t code) {
    const auto bits = static_cast<uint16_t>(code);
    Half x;
    memcpy(&x, &bits, sizeof x);
    return static_cast<double>(x);
}

double single(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

double value(Type type, uint32_t code) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    switch (type) {
        case Type::f16: return half(code);
        case Type::bf16: return single(code << 16);
        case Type::tf32: return single(code & ~0x1fffu);
        case Type::e4m3: return (code & 127) == 127 ? kNan : small_float(code, 4, 3);
        case Type::e5m2:
            if ((code & 127) < 124) return small_float(code, 5, 2);
            return (code & 3) ? kNan : code & 128 ? -HUGE_VAL : HUGE_VAL;
        case Type::e2m3: return small_float(code, 2, 3);
        case Type::e3m2: return small_float(code, 3, 2);
        case Type::e2m1: return small_float(code, 2, 1);
        case Type::s8: return static_cast<int8_t>(code);
        default: return code & 255;
    }
}

uint32_t extract(const uint8_t *chunk, uint32_t bit, uint32_t bits) {
    uint64_t word = 0;
    memcpy(&word, chunk + bit / 8, bit / 8 + 8 <= kChunk ? 8 : kChunk - bit / 8);
    return static_cast<uint32_t>(word >> bit % 8 & ((uint64_t{1} << bits) - 1));
}

// The factors of block scaling (9.7.16.10.7): row r of A, or column r of B, has them in lane r % 32 and column r / 32. They are the
// same in the four groups of 32 lanes.
double factor(cs_warp *w, Block &block, uint32_t address, uint32_t r, uint32_t byte, bool e4m3) {
    const uint32_t code = cell(w, block, r % 32, (address & 0xffff) + r / 32) >> 8 * byte & 255;
    if (e4m3) return value(Type::e4m3, code & 127);
    return code == 255 ? std::numeric_limits<double>::quiet_NaN()
                       : std::ldexp(1, static_cast<int>(code) - 127);
}

// A multiplication. The instruction descriptor says what the instruction leaves open (9.7.16.4.2).
class Multiplication {
  public:
    Multiplication(cs_warp *w, const cs_tensor_memory &q) : w_(w), q_(q), pair_(pair_of(w, q.pair)) {
        const uint32_t d = q.descriptor;
        m_ = (d >> 24 & 31) << 4;
        n_ = (d >> 17 & 63) << 3;
        packed_ = q.kind == CS_TMEM_MXF4;
        scaled_ = q.factors != 0;
        a_ = type(d >> 7 & 7);
        b_ = type(d >> 10 & (packed_ ? 3 : 7));
        d_ = scaled_ ? 1 : d >> 4 & 3;
        k_ = packed_ ? 64 : a_ == Type::tf32 ? 8 : bits_of(a_) == 16 ? 16 : 32;
        turned_a_ = d >> 15 & 1, turned_b_ = d >> 16 & 1;
        const bool fits = q.weights
                              ? (m_ == 32 || m_ == 64 || m_ == 128) && (n_ == 64 || n_ == 128 || n_ == 256)
                          : q.pair ? (m_ == 128 || m_ == 256) && n_ % 16 == 0
                                   : m_ == 128 || (m_ == 64 && !scaled_);
        const bool known = q.kind == CS_TMEM_I8 ? d_ == 2 : q.kind == CS_TMEM_TF32 ? d_ == 1 : d_ < 2;
        if (!fits || !known || n_ == 0 || n_ > 256 || d & 4 || (packed_ && (turned_a_ || turned_b_)) ||
            (scaled_ && (q.pair || d >> 31)))
            refuse(w, "the embedded device does not multiply as this instruction descriptor says");
    }
    void run() {
        read_a();
        read_b();
        for (uint32_t row = 0; row < m_; row++)
            for (uint32_t column = 0; column < n_; column++) {
                uint32_t lane, at;
                Block &block = place(row, column, lane, at);
                const uint32_t member = &block == pair_.blocks[0] ? 0 : 4;
                if (q_.hidden[member + lane / 32] >> lane % 32 & 1) continue;
                uint32_t &to = cell(w_, block, (q_.address >> 16) + lane, (q_.address & 0xffff) + at);
                double sum = q_.keeps ? std::ldexp(previous(to), -static_cast<int>(q_.halvings)) : 0;
                for (uint32_t k = 0; k < k_; k++) sum += x_[row * k_ + k] * y_[k * n_ + column];
                to = result(sum);
            }
    }

  private:
    Type type(uint32_t code) const {
        static constexpr Type kSmall[] = {Type::e4m3, Type::e5m2, Type::e4m3,
                                          Type::e2m3, Type::e3m2, Type::e2m1};
        switch (q_.kind) {
            case CS_TMEM_F16:
                if (code < 2) return code ? Type::bf16 : Type::f16;
                break;
            case CS_TMEM_TF32:
                if (code == 2) return Type::tf32;
                break;
            case CS_TMEM_I8:
                if (code < 2) return code ? Type::s8 : Type::u8;
                break;
            case CS_TMEM_MXF4:
                if (code == 1) return Type::e2m1;
                break;
            default:
                if (code < 6 && code != 2) return kSmall[code];
        }
        refuse(w_, "the instruction descriptor has a type that this kind of tcgen05.mma has not");
    }
    // Reads `lines` rows of A or columns of B from one block's shared memory.
    template <typename Put>
    void gather(Block &block, uint64_t descriptor, Type type, bool turned, uint32_t lines, Put put) {
        const Shared matrix(w_, descriptor, turned);
        const uint32_t bits = bits_of(type);
        const uint32_t each = packed_ ? 32 : bits >= 16 ? 128 / bits : 16;  // elements in a chunk
        for (uint32_t line = 0; line < lines; line++)
            for (uint32_t k = 0; k < k_; k++) {
                const uint32_t along = turned ? line : k, across = turned ? k : line;
                const uint8_t *const chunk = matrix.chunk(block, along / each, across);
                put(line, k, value(type, extract(chunk, along % each * bits, bits)));
            }
    }
    void read_a() {
        const double sign = q_.descriptor >> 13 & 1 ? -1 : 1;
        const uint32_t rows = m_ / pair_.count;
        for (uint32_t n = 0; n < pair_.count; n++) {
            Block &block = *pair_.blocks[n];
            const auto put = [&](uint32_t row, uint32_t k, double x) {
                if (scaled_)
                    x *= factor(w_, block, q_.scale_a, row, (q_.descriptor >> 29 & 3) + k * q_.factors / k_,
                                e4m3());
                x_[(row + n * rows) * k_ + k] = sign * x;
            };
            if (!q_.a_in_memory) {
                gather(block, q_.a, a_, turned_a_, rows, put);
                continue;
            }
            const uint32_t bits = packed_ ? 4 : bits_of(a_), address = static_cast<uint32_t>(q_.a);
            if (rows != 128 || address >> 16 || (bits < 8 && !packed_))
                refuse(w_, "the embedded device has this matrix A only in shared memory");
            for (uint32_t row = 0; row < rows; row++)
                for (uint32_t k = 0; k < k_; k++) {
                    const uint32_t word = cell(w_, block, row, address + k * bits / 32);
                    put(row, k,
                        value(a_, word >> k * bits % 32 & static_cast<uint32_t>((uint64_t{1} << bits) - 1)));
                }
        }
    }
    void read_b() {
        const double sign = q_.descriptor >> 14 & 1 ? -1 : 1;
        const uint32_t columns = n_ / pair_.count;
        for (uint32_t n = 0; n < pair_.count; n++) {
            Block &block = *pair_.blocks[n];
            gather(block, q_.b, b_, turned_b_, columns, [&](uint32_t column, uint32_t k, double y) {
                if (scaled_)
                    y *= factor(w_, block, q_.scale_b, column, (q_.descriptor >> 4 & 3) + k * q_.factors / k_,
                                e4m3());
                y_[k * n_ + column + n * columns] = sign * y;
            });
        }
    }
    bool e4m3() const { return !(q_.descriptor >> 23 & 1); }
    // Returns the block that has an element of D, and sets its lane and its column there (9.7.16.10.5).
    Block &place(uint32_t row, uint32_t column, uint32_t &lane, uint32_t &at) {
        lane = row, at = column;
        if (q_.pair && m_ == 256) {
            lane = row % 128;
            return *pair_.blocks[row / 128];
        }
        if (q_.pair) {
            lane = row % 64 + column / (n_ / 2) * 64, at = column % (n_ / 2);
            return *pair_.blocks[row / 64];
        }
        if (q_.weights) lane = row + column / (n_ * m_ / 128) * m_, at = column % (n_ * m_ / 128);
        else if (m_ == 64) lane = row / 16 * 32 + row % 16;
        return *pair_.blocks[0];
    }
    double previous(uint32_t bits) const {
        return d_ == 0   ? half(bits)
               : d_ == 1 ? single(bits)
                         : static_cast<double>(static_cast<int32_t>(bits));
    }
    uint32_t result(double x) const {
        if (d_ == 2) {
            if (q_.descriptor >> 3 & 1)
                x = x > 0x7fffffff ? 0x7fffffff : x < -2147483648.0 ? -2147483648.0 : x;
            return static_cast<uint32_t>(static_cast<int64_t>(x));
        }
        if (d_ == 0) {
            if (std::isnan(x)) return 0x7fff;
            const auto rounded = static_cast<Half>(x);
            uint16_t bits;
            memcpy(&bits, &rounded, sizeof bits);
            return bits;
        }
        if (std::isnan(x)) return 0x7fffffff;
        const auto rounded = static_cast<float>(x);
        uint32_t bits;
        memcpy(&bits, &rounded, sizeof bits);
        return bits;
    }

    cs_warp *w_;
    const cs_tensor_memory &q_;
    Pair pair_;
    uint32_t m_, n_, k_, d_;  // d_: the type of D: f16, f32, s32
    Type a_, b_;
    bool packed_, scaled_, turned_a_, turned_b_;
    double x_[8192], y_[64 * 256];  // A by rows, B by rows of K. Arrays, because a fault runs no destructors
};

// tcgen05.cp: rows of 16 or 32 bytes from shared memory. Several groups of 32 lanes may get the same row.
void copy(cs_warp *w, const cs_tensor_memory &q) {
    const Shared matrix(w, q.a, false);
    const Pair pair = pair_of(w, q.pair);
    const bool wide = q.shape == CS_TMEM_128X256B;
    const uint32_t rows = q.shape == CS_TMEM_32X128B                                             ? 32
                          : q.shape == CS_TMEM_64X128B_02_13 || q.shape == CS_TMEM_64X128B_01_23 ? 64
                                                                                                 : 128;
    for (uint32_t n = 0; n < pair.count; n++)
        for (uint32_t row = 0; row < rows; row++)
            for (uint32_t c = 0; c < (wide ? 2u : 1u); c++) {
                uint32_t words[4];
                memcpy(words, matrix.chunk(*pair.blocks[n], c, row), sizeof words);
                for (uint32_t copy = 0; copy < kLanes / rows; copy++) {
                    const uint32_t lane = q.shape == CS_TMEM_64X128B_01_23
                                              ? row / 32 * 64 + row % 32 + copy * 32
                                              : row + copy * rows;
                    for (uint32_t i = 0; i < 4; i++)
                        cell(w, *pair.blocks[n], (q.address >> 16) + lane, (q.address & 0xffff) + c * 4 + i) =
                            words[i];
                }
            }
}

}  // namespace

uint32_t tensor_memory(cs_warp *w, const cs_tensor_memory *request) {
    const cs_tensor_memory &q = *request;
    switch (q.operation) {
        case CS_TMEM_ALLOCATE: return allocate(w, q.count);
        case CS_TMEM_RELEASE: release(w, q.address, q.count); break;
        case CS_TMEM_LOAD:
        case CS_TMEM_STORE: move(w, q); break;
        case CS_TMEM_COPY: copy(w, q); break;
        default: Multiplication(w, q).run();
    }
    return 0;
}

}  // namespace cudasim
