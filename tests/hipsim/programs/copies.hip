// Copies in every direction, without a kernel of the program's own; "memset" fills memory too, with AMD's kernels.
#include "check.h"

static std::vector<uint8_t> pattern(size_t size, int seed) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; i++) bytes[i] = static_cast<uint8_t>(i * 7 + i / 253 + seed);
    return bytes;
}

int main(int count, char **arguments) {
    bool fills = count > 1 && strcmp(arguments[1], "memset") == 0;
    for (size_t size : {1, 3, 4, 63, 64, 65, 4095, 4096, 4097, 100003, 1 << 20, (5 << 20) + 13}) {
        std::vector<uint8_t> from = pattern(size, 1);
        Buffer<uint8_t> memory(from);
        CHECK(memory.read() == from);
        if (size > 16) {  // a part, at odd places
            std::vector<uint8_t> part = pattern(size - 9, 2), expected = from, got(size - 9);
            std::copy(part.begin(), part.end(), expected.begin() + 5);
            OK(hipMemcpy(memory.data + 5, part.data(), part.size(), hipMemcpyHostToDevice));
            CHECK(memory.read() == expected);
            OK(hipMemcpy(got.data(), memory.data + 5, got.size(), hipMemcpyDeviceToHost));
            CHECK(got == part);
        }
    }

    // Pinned memory, asynchronously.
    const size_t size = 3 << 20;
    uint8_t *pinned, *back;
    OK(hipHostMalloc(reinterpret_cast<void **>(&pinned), size));
    OK(hipHostMalloc(reinterpret_cast<void **>(&back), size));
    for (size_t i = 0; i < size; i++) pinned[i] = static_cast<uint8_t>(i * 13 + 5);
    hipStream_t stream;
    OK(hipStreamCreate(&stream));
    Buffer<uint8_t> memory(size);
    OK(hipMemcpyAsync(memory, pinned, size, hipMemcpyHostToDevice, stream));
    OK(hipMemcpyAsync(back, memory, size, hipMemcpyDeviceToHost, stream));
    OK(hipStreamSynchronize(stream));
    CHECK(memcmp(pinned, back, size) == 0);

    // The program's own memory, registered.
    std::vector<uint8_t> own = pattern(size, 3), target(size);
    OK(hipHostRegister(own.data(), size, hipHostRegisterDefault));
    OK(hipMemcpyAsync(memory, own.data(), size, hipMemcpyHostToDevice, stream));
    OK(hipMemcpyAsync(target.data(), memory, size, hipMemcpyDeviceToHost, stream));
    OK(hipStreamSynchronize(stream));
    CHECK(own == target);
    OK(hipHostUnregister(own.data()));

    // Windows of two dimensions.
    const size_t width = 100, height = 50, pitch = 128;
    std::vector<uint8_t> square = pattern(pitch * height, 4), result(pitch * height);
    Buffer<uint8_t> window(512 * height);
    OK(hipMemcpy2D(window, 512, square.data(), pitch, width, height, hipMemcpyHostToDevice));
    OK(hipMemcpy2D(result.data(), pitch, window, 512, width, height, hipMemcpyDeviceToHost));
    for (size_t y = 0; y < height; y++)
        for (size_t x = 0; x < pitch; x++)
            CHECK(result[y * pitch + x] == (x < width ? square[y * pitch + x] : 0));

    if (fills) {
        Buffer<uint8_t> filled(100003);
        OK(hipMemset(filled, 0x5a, 100003));
        OK(hipMemset(filled.data + 7, 0x11, 101));
        std::vector<uint8_t> bytes = filled.read();
        for (size_t i = 0; i < bytes.size(); i++) CHECK(bytes[i] == (i >= 7 && i < 108 ? 0x11 : 0x5a));
        Buffer<uint8_t> copy(100003);
        OK(hipMemcpy(copy, filled, 100003, hipMemcpyDeviceToDevice));
        CHECK(copy.read() == bytes);
        Buffer<uint32_t> words(1000);
        OK(hipMemsetD32(reinterpret_cast<hipDeviceptr_t>(words.data), 0xdeadbeef, 1000));
        for (uint32_t word : words.read()) CHECK(word == 0xdeadbeef);
    }
    OK(hipHostFree(pinned));
    OK(hipHostFree(back));
    OK(hipStreamDestroy(stream));
    puts("copies are right");
}
