// heap THREADS BLOCKS: threads allocate blocks of all sizes, hand them to each other, and check that each keeps its contents. A fork in
// the middle must leave a child that can allocate. Compiled with the agent's heap.cpp, whose operator new it uses.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

struct Block {
    size_t size, alignment;
    unsigned char value;
    unsigned char bytes[1];
};
constexpr size_t kShared = 64;
std::atomic<Block *> handed_over[kShared];

void must(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    _exit(1);
}

Block *make(std::mt19937 &random) {
    static constexpr size_t kOrders[] = {16, 100, 1000, 5000, 70000, 300000};
    const size_t size = random() % kOrders[random() % 6], whole = sizeof(Block) + size;
    const size_t alignment = random() % 4 ? 0 : size_t(64) << random() % 4;
    void *memory =
        alignment ? operator new(whole, static_cast<std::align_val_t>(alignment)) : operator new(whole);
    must(reinterpret_cast<uintptr_t>(memory) % (alignment ? alignment : 16) == 0, "not aligned");
    auto *block = static_cast<Block *>(memory);
    *block = {size, alignment, static_cast<unsigned char>(random()), {}};
    memset(block->bytes, block->value, size);
    return block;
}

void check_and_free(Block *block) {
    if (!block) return;
    for (size_t i = 0; i < block->size; ++i) must(block->bytes[i] == block->value, "overwritten");
    if (block->alignment) operator delete(block, static_cast<std::align_val_t>(block->alignment));
    else operator delete(block);
}

void work(unsigned seed, int blocks) {
    std::mt19937 random(seed);
    for (int i = 0; i < blocks; ++i) check_and_free(handed_over[random() % kShared].exchange(make(random)));
}

}  // namespace

int main(int, char **argv) {
    const int threads = atoi(argv[1]), blocks = atoi(argv[2]);
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) running.emplace_back(work, i, blocks);
    for (int i = 0; i < 20; ++i) {
        const pid_t child = fork();
        if (!child) {
            alarm(60);
            std::mt19937 random(i);
            for (int n = 0; n < 100; ++n) check_and_free(make(random));
            _exit(0);
        }
        int status = -1;
        must(waitpid(child, &status, 0) == child && !status, "the child failed");
    }
    for (auto &thread : running) thread.join();
    for (auto &block : handed_over) check_and_free(block.exchange(nullptr));
    volatile size_t most = SIZE_MAX - 8;
    must(!operator new(most, std::nothrow), "allocated all memory");
    puts("right");
}
