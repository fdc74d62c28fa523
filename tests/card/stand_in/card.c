/* The card itself: its properties and its memory. */
#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MIB ((size_t)1 << 20)
#define PAGE (2 * MIB)            /* what a card maps memory in */
#define CONTEXT (600 * MIB)       /* taken before torch allocates anything */
#define ADDRESSES ((size_t)1 << 46)
#define WINDOW (32 * MIB)         /* what the driver takes addresses in */
#define MOST_BLOCKS 65536

static struct card card;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Programs ask whether this symbol exists to know that kernels do nothing here. */
int memopt_card_stand_in = 1;

static void read_card(void) {
    const char *text = getenv("MEMOPT_CARD");
    unsigned long long mib = 0;
    if (!text || sscanf(text, "%127[^,],%llu,%d.%d,%d", card.name, &mib, &card.major, &card.minor,
                        &card.multiprocessors) != 5) {
        if (text) fprintf(stderr, "MEMOPT_CARD must be \"name,MiB,major.minor,multiprocessors\", not %s\n", text), exit(2);
        strcpy(card.name, "NVIDIA H200");
        mib = 143771, card.major = 9, card.minor = 0, card.multiprocessors = 132;
    }
    card.bytes = mib * MIB;
}

const struct card *the_card(void) {
    pthread_once(&once, read_card);
    return &card;
}

int threads_per_multiprocessor(void) {
    int major = the_card()->major, minor = the_card()->minor;
    if (major == 7 && minor == 5) return 1024;
    return (major == 8 && minor > 0) || major == 12 ? 1536 : 2048;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used = CONTEXT;
static struct { char *start; size_t bytes; } blocks[MOST_BLOCKS];
static int block_count;
/* Addresses as a driver was seen to give them out (docs/card.md): a block gets the first of the smallest holes that are
   large enough, else a new range, in whole windows, at the highest free place. A range without blocks is given back. */
static struct range { char *start; size_t bytes, used; } ranges[MOST_BLOCKS];
static struct { char *start; size_t bytes; } holes[MOST_BLOCKS];
static int range_count, hole_count;
static char *top;

static int take(size_t bytes) {
    if (used + bytes > the_card()->bytes) return 0;
    used += bytes;
    return 1;
}

int card_take(size_t bytes) {
    pthread_mutex_lock(&lock);
    int taken = take(bytes);
    pthread_mutex_unlock(&lock);
    return taken;
}

void card_give_back(size_t bytes) {
    pthread_mutex_lock(&lock);
    used -= bytes;
    pthread_mutex_unlock(&lock);
}

size_t card_free_bytes(void) {
    pthread_mutex_lock(&lock);
    size_t left = the_card()->bytes - used;
    pthread_mutex_unlock(&lock);
    return left;
}

static struct range *range_of(const char *address) {
    for (int i = 0; i < range_count; i++)
        if (address >= ranges[i].start && address < ranges[i].start + ranges[i].bytes) return &ranges[i];
    return NULL;
}

static void add_range(size_t bytes) {
    char *highest = NULL;
    for (int i = -1; i < range_count; i++) {
        char *start = (i < 0 ? top : ranges[i].start) - bytes;
        int is_free = 1;
        for (int j = 0; j < range_count; j++)
            is_free &= start >= ranges[j].start + ranges[j].bytes || start + bytes <= ranges[j].start;
        if (is_free && start > highest) highest = start;
    }
    ranges[range_count++] = (struct range){highest, bytes, 0};
    holes[hole_count].start = highest;
    holes[hole_count++].bytes = bytes;
}

static size_t in_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static char *take_addresses(size_t bytes) {
    int best = -1;
    for (int i = 0; i < hole_count; i++)
        if (holes[i].bytes >= bytes && (best < 0 || holes[i].bytes < holes[best].bytes ||
                                        (holes[i].bytes == holes[best].bytes && holes[i].start < holes[best].start)))
            best = i;
    if (best < 0) {
        add_range((bytes + WINDOW - 1) / WINDOW * WINDOW);
        best = hole_count - 1;
    }
    char *found = holes[best].start;
    range_of(found)->used += bytes;
    holes[best].start += bytes;
    if (!(holes[best].bytes -= bytes)) holes[best] = holes[--hole_count];
    return found;
}

static void give_addresses_back(char *start, size_t bytes) {
    struct range *range = range_of(start);
    range->used -= bytes;
    for (int i = 0; i < hole_count; i++) {
        if (range_of(holes[i].start) != range) continue;
        int is_next = holes[i].start + holes[i].bytes == start || start + bytes == holes[i].start;
        if (!is_next && range->used) continue;
        if (is_next) start = start < holes[i].start ? start : holes[i].start, bytes += holes[i].bytes;
        holes[i--] = holes[--hole_count];
    }
    if (range->used) holes[hole_count].start = start, holes[hole_count++].bytes = bytes;
    else *range = ranges[--range_count];
}

void *card_allocate(size_t bytes) {
    pthread_mutex_lock(&lock);
    char *found = NULL;
    if (block_count < MOST_BLOCKS && range_count < MOST_BLOCKS && hole_count < MOST_BLOCKS && take(bytes)) {
        if (!top) {
            char *all = mmap(NULL, ADDRESSES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (all == MAP_FAILED) perror("stand-in: no addresses"), exit(2);
            top = (char *)(((uintptr_t)all + ADDRESSES) / WINDOW * WINDOW);
        }
        found = take_addresses(in_pages(bytes));
        blocks[block_count].start = found;
        blocks[block_count++].bytes = bytes;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* The number of the block that the address lies in, -1 where it is not on the card; called with the lock held. */
static int block_of(const char *address) {
    for (int i = 0; i < block_count; i++)
        if (address >= blocks[i].start && address < blocks[i].start + blocks[i].bytes) return i;
    return -1;
}

void card_free(void *address) {
    pthread_mutex_lock(&lock);
    int i = block_of(address);
    if (i >= 0) {
        madvise(blocks[i].start, blocks[i].bytes, MADV_DONTNEED);
        used -= blocks[i].bytes;
        give_addresses_back(blocks[i].start, in_pages(blocks[i].bytes));
        blocks[i] = blocks[--block_count];
    }
    pthread_mutex_unlock(&lock);
}

int is_on_card(const void *address) {
    pthread_mutex_lock(&lock);
    int found = block_of(address) >= 0;
    pthread_mutex_unlock(&lock);
    return found;
}

void *new_handle(void) { return calloc(1, 256); }

int succeed(void) { return 0; }

void trace(const char *function) {
    static int wanted = -1;
    if (wanted < 0) wanted = getenv("MEMOPT_CARD_TRACE") != NULL;
    if (wanted) fprintf(stderr, "[card] %s\n", function);
}

long long setting(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text ? atoll(text) : otherwise;
}
