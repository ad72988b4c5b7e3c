// The C interface between package rocks and its native code. Every function is
// safe against C++ exceptions and calls back into nothing. Who frees what is
// said at each function; ks_live_objects counts what is not freed yet.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ks_driver ks_driver;
typedef struct ks_store ks_store;
typedef struct ks_family ks_family;
typedef struct ks_snapshot ks_snapshot;
typedef struct ks_iter ks_iter;

// Codes of ks_status; errors.go maps them to sentinels.
enum {
  KS_OK = 0,
  KS_CORRUPT = 1,
  KS_NO_SPACE = 2,
  KS_IO = 3,
  KS_SHUTDOWN = 4,
  KS_INVALID = 5,
  KS_UNSUPPORTED = 6,
  KS_LOCKED = 7,
  KS_NO_FAMILY = 8,
  KS_INTERNAL = 9,
  KS_BAD_OPERAND = 10,
  KS_OPERAND_VERSION = 11,
  KS_CANCELLED = 12,
  KS_CONFLICT = 13,
};

// A status with a message, which the receiver frees by free(); NULL when OK.
typedef struct {
  int code;
  char* message;
} ks_status;

// Limits and sizes that all stores of a driver share.
typedef struct {
  size_t cache_bytes;
  size_t write_buffer_bytes;
  size_t family_buffer_bytes;
  int max_open_files;
  int background_jobs;
  int max_successive_merges;
} ks_driver_options;

// How a family is made; the numbers are those of engine.FamilyOptions.
typedef struct {
  uint32_t id;
  uint8_t use;
  uint8_t merge;
  uint8_t group_width;  // 0: the family has no prefix
  uint8_t filter;       // FilterMode
  uint64_t buffer_bytes;  // 0: the driver's default
} ks_family_options;

typedef struct {
  uint64_t keys, disk_bytes, memtable_bytes, pending_compaction, level0_files;
  uint64_t filter_useful, write_stopped, delayed_rate;
} ks_family_stats;

int64_t ks_live_objects(void);

ks_driver* ks_driver_new(const ks_driver_options* o);
void ks_driver_free(ks_driver* d);
uint64_t ks_driver_cache_usage(ks_driver* d);
uint64_t ks_driver_memtable_usage(ks_driver* d);

// Lists the names of the families in dir, each ended by a zero byte, in a
// buffer that the receiver frees by free().
ks_status ks_list_families(const char* dir, char** names, size_t* len);

// Opens the store with exactly the families given, whose names are in names,
// each ended by a zero byte, in the same order; families[i] receives a
// reference that ks_family_release gives back. The first is "default".
ks_status ks_open(ks_driver* d, const char* dir, int read_only, const ks_family_options* o, const char* names,
                  size_t n, ks_family** families, ks_store** out);
// Makes running compactions and flushes end early.
void ks_interrupt(ks_store* s);
// All families, snapshots and iterators must have been released before.
ks_status ks_close(ks_store* s);

ks_status ks_create_family(ks_store* s, const ks_family_options* o, const char* name, ks_family** out);
ks_status ks_drop_family(ks_store* s, uint32_t id);
void ks_family_release(ks_family* f);
void ks_family_set_use(ks_family* f, uint8_t use);
void ks_family_set_filter(ks_family* f, uint8_t mode);

ks_status ks_write(ks_store* s, const char* batch, size_t len);

ks_snapshot* ks_snapshot_new(ks_store* s);
void ks_snapshot_release(ks_snapshot* v);

// Reads one key: *found tells whether it is there, *value_len its length; the
// value is copied to buf if it fits. persisted reads what a crash would leave.
ks_status ks_get(ks_family* f, ks_snapshot* v, int persisted, const char* key, size_t key_len, char* buf, size_t cap,
                 int* found, size_t* value_len);

// Reads n keys, packed as length u32 and bytes. The answer is per key a length
// u32 (0xffffffff: absent) and the value; it is in buf if it fits, else in
// *big, which the receiver frees by free(). *used is its length.
ks_status ks_multi_get(ks_family* f, ks_snapshot* v, const char* keys, size_t keys_len, size_t n, char* buf,
                       size_t cap, char** big, size_t* used);

enum {
  KS_SCAN_REVERSE = 1,
  KS_SCAN_KEYS_ONLY = 2,
  KS_SCAN_HAS_HI = 4,
};

// What a scan call filled: count entries in used bytes, each as key length u32,
// value length u32, key, value. If need is not 0 the next entry needs a buffer
// of that size and nothing was filled.
typedef struct {
  size_t used, count, need;
} ks_block;

// Starts a scan and fills the first block. *out is NULL if the scan is over,
// else an iterator that ks_iter_free frees.
ks_status ks_scan(ks_family* f, ks_snapshot* v, const char* lo, size_t lo_len, const char* hi, size_t hi_len,
                  int flags, char* buf, size_t cap, size_t max_entries, ks_block* block, ks_iter** out);
// Fills the next block; *done tells that the scan is over.
ks_status ks_iter_fill(ks_iter* it, char* buf, size_t cap, size_t max_entries, ks_block* block, int* done);
void ks_iter_free(ks_iter* it);

ks_status ks_flush(ks_store* s);
ks_status ks_checkpoint(ks_store* s, const char* dir);
ks_status ks_compact(ks_store* s);
// Removes the keys of a family outside [lo, hi), hi NULL meaning no end, and
// leaves neither anything of them, nor a range tombstone, nor a file of level 0.
// Nobody may write beside it, and no snapshot may be open.
ks_status ks_clip(ks_store* s, uint32_t id, const char* lo, size_t lo_len, const char* hi, size_t hi_len);
// Whether ks_clip ends early from now on, with KS_CANCELLED.
void ks_set_cancelled(ks_store* s, int cancelled);
// Makes the family of o anew, of its own files and those that n other stores have
// of it; all are as ks_clip leaves them and no two have keys in a common range.
// scratch is a directory on the store's volume. *out is NULL if nobody else has
// any. *dropped tells that the family is not there any more: it failed then, or
// *out has taken its place.
ks_status ks_absorb(ks_store* s, const ks_family_options* o, const char* name, ks_store** others, size_t n,
                    const char* scratch, int* dropped, ks_family** out);
ks_status ks_verify(ks_store* s);
// The files that the database needs at this moment, each ended by a zero byte,
// to be freed by free(), and how much of the newest MANIFEST is valid.
ks_status ks_live_files(ks_store* s, char** names, size_t* len, uint64_t* manifest_size);
// Reads an SST file beside the database and checks all of its checksums.
ks_status ks_verify_file(ks_store* s, const char* path);
ks_status ks_stats(ks_family* f, ks_family_stats* out);
// The first background error, which stands as long as the store is open, and the
// duration of the last flush of any family.
ks_status ks_background_error(ks_store* s);
uint64_t ks_last_flush_micros(ks_store* s);
uint64_t ks_flush_count(ks_store* s);

// For tests: folds values, packed as length u32 and bytes, with the merge
// operator of a kind, through FullMerge or, with partial set, PartialMerge.
// *ok tells whether the operator accepted them; the result as in ks_multi_get.
ks_status ks_merge_for_test(uint8_t kind, int has_base, int partial, const char* values, size_t len, size_t n,
                            char** big, size_t* used, int* ok);
// For tests: gives unused memory of the C allocator back to the system.
void ks_trim_for_test(void);
// For tests: keeps RocksDB in the whole process from compacting by itself, or lets
// it go on; returns when it is so.
void ks_hold_compactions_for_test(int hold);
// For tests: length of the prefix of a key.
size_t ks_prefix_for_test(uint8_t width, const char* key, size_t len);

#ifdef __cplusplus
}
#endif
