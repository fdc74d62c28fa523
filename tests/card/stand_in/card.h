/* What the parts of the stand-in share: what the card is, its memory, and the handles that it gives out. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Properties that no other follows from. MEMOPT_CARD="name,MiB,capability,multiprocessors" sets them. */
struct card {
    char name[128];
    size_t bytes;
    int major, minor, multiprocessors;
};

const struct card *the_card(void);
int threads_per_multiprocessor(void);

/* Device memory is host memory that gets pages only when the host writes to it, so that a large card costs nothing. */
void *card_allocate(size_t bytes); /* NULL where the card is full */
void card_free(void *address);
int card_take(size_t bytes); /* takes memory without an address: 0 where the card is full */
void card_give_back(size_t bytes);
size_t card_free_bytes(void);
int is_on_card(const void *address);

/* Zeroed memory for an object that the caller only hands back: a stream, a module, a descriptor. */
void *new_handle(void);
/* Any function that has nothing to do: it takes anything and succeeds. */
int succeed(void);
void trace(const char *function); /* prints the name where MEMOPT_CARD_TRACE is set */
long long setting(const char *name, long long otherwise);
