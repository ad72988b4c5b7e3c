// Reads: packed gets, multi-gets and scans, each one crossing from Go.

#include <malloc.h>

#include <deque>

#include "native_internal.h"

using namespace keelstate;
using rocksdb::PinnableSlice;
using rocksdb::ReadOptions;
using rocksdb::Slice;
using rocksdb::Status;

struct ks_iter : Counted {
  std::string lo, hi;
  Slice lower, upper;
  bool reverse = false, keys_only = false;
  std::unique_ptr<rocksdb::Iterator> it;
};

namespace {

constexpr uint32_t kAbsent = 0xffffffff;

void At(ReadOptions* ro, ks_snapshot* v) {
  if (v != nullptr) ro->snapshot = v->snapshot;
}

void PutU32(char* p, size_t n) {
  uint32_t v = static_cast<uint32_t>(n);
  std::memcpy(p, &v, 4);
}

// Unpack reads n strings, each a length u32 and its bytes.
bool Unpack(const char* p, size_t len, size_t n, std::vector<Slice>* out) {
  const char* end = p + len;
  out->reserve(n);
  for (size_t i = 0; i < n; i++) {
    uint32_t k;
    if (end - p < 4) return false;
    std::memcpy(&k, p, 4);
    p += 4;
    if (static_cast<size_t>(end - p) < k) return false;
    out->emplace_back(p, k);
    p += k;
  }
  return p == end;
}

// Room returns buf if need fits, else allocates *big.
char* Room(char* buf, size_t cap, size_t need, char** big) {
  *big = nullptr;
  if (need <= cap) return buf;
  *big = static_cast<char*>(malloc(need));
  if (*big == nullptr) throw std::bad_alloc();
  return *big;
}

// SamePrefix tells whether all keys in [lo, hi) have the prefix of lo, so that
// an iterator may look at that prefix alone.
bool SamePrefix(const Family& f, const ks_iter& it, bool has_hi) {
  if (f.options.group_width == 0 || !has_hi) return false;
  bool terminated;
  size_t n = PrefixLength(it.lo.data(), it.lo.size(), f.options.group_width, &terminated);
  return terminated && it.hi.size() > n && it.hi.compare(0, n, it.lo, 0, n) == 0;
}

ks_status Fill(ks_iter* it, char* buf, size_t cap, size_t max_entries, ks_block* b, int* done) {
  *b = ks_block{0, 0, 0};
  *done = 0;
  for (; it->it->Valid(); it->reverse ? it->it->Prev() : it->it->Next()) {
    if (b->count == max_entries) return OK();
    Slice key = it->it->key(), value;
    if (!it->keys_only) value = it->it->value();
    size_t need = 8 + key.size() + value.size();
    if (b->used + need > cap) {
      if (b->count == 0) b->need = need;
      return OK();
    }
    char* p = buf + b->used;
    PutU32(p, key.size());
    PutU32(p + 4, value.size());
    std::memcpy(p + 8, key.data(), key.size());
    if (value.size() > 0) std::memcpy(p + 8 + key.size(), value.data(), value.size());
    b->used += need;
    b->count++;
  }
  *done = 1;
  return FromRocks(it->it->status());
}

void Position(const Family& f, ks_snapshot* v, bool has_hi, ks_iter* it) {
  ReadOptions ro;
  At(&ro, v);
  it->lower = it->lo;
  it->upper = it->hi;
  if (!it->lo.empty()) ro.iterate_lower_bound = &it->lower;
  if (has_hi) ro.iterate_upper_bound = &it->upper;
  // The prefix iterator of a hash memtable cannot go back.
  ro.total_order_seek = it->reverse || !SamePrefix(f, *it, has_hi);
  it->it.reset(f.db->NewIterator(ro, f.handle));
  if (it->reverse) {
    it->it->SeekToLast();
  } else {
    it->it->Seek(it->lower);
  }
}

}  // namespace

extern "C" {

ks_snapshot* ks_snapshot_new(ks_store* s) {
  auto v = new ks_snapshot();
  v->db = s->db.get();
  v->snapshot = v->db->GetSnapshot();
  return v;
}

void ks_snapshot_release(ks_snapshot* v) {
  v->db->ReleaseSnapshot(v->snapshot);
  delete v;
}

ks_status ks_get(ks_family* ref, ks_snapshot* v, int persisted, const char* key, size_t key_len, char* buf, size_t cap,
                 int* found, size_t* value_len) {
  return Guarded([&] {
    const Family& f = *ref->family;
    ReadOptions ro;
    At(&ro, v);
    // With the write-ahead log off this tier is the SST files alone.
    if (persisted) ro.read_tier = rocksdb::kPersistedTier;
    PinnableSlice value;
    Status st = f.db->Get(ro, f.handle, Slice(key, key_len), &value);
    *found = st.ok() ? 1 : 0;
    *value_len = value.size();
    if (st.IsNotFound()) return OK();
    if (st.ok() && value.size() > 0 && value.size() <= cap) std::memcpy(buf, value.data(), value.size());
    return FromRocks(st);
  });
}

ks_status ks_multi_get(ks_family* ref, ks_snapshot* v, const char* keys, size_t keys_len, size_t n, char* buf,
                       size_t cap, char** big, size_t* used) {
  return Guarded([&] {
    const Family& f = *ref->family;
    std::vector<Slice> k;
    if (!Unpack(keys, keys_len, n, &k)) return MakeStatus(KS_INVALID, "packed keys: cut short");
    ReadOptions ro;
    At(&ro, v);
    std::vector<PinnableSlice> values(n);
    std::vector<Status> st(n);
    f.db->MultiGet(ro, f.handle, n, k.data(), values.data(), st.data(), false);
    size_t need = 4 * n;
    for (size_t i = 0; i < n; i++) {
      if (st[i].ok()) {
        need += values[i].size();
      } else if (!st[i].IsNotFound()) {
        return FromRocks(st[i]);
      }
    }
    char* p = Room(buf, cap, need, big);
    *used = need;
    for (size_t i = 0; i < n; i++, p += 4) {
      if (!st[i].ok()) {
        PutU32(p, kAbsent);
        continue;
      }
      PutU32(p, values[i].size());
      if (values[i].size() > 0) std::memcpy(p + 4, values[i].data(), values[i].size());
      p += values[i].size();
    }
    return OK();
  });
}

ks_status ks_scan(ks_family* ref, ks_snapshot* v, const char* lo, size_t lo_len, const char* hi, size_t hi_len,
                  int flags, char* buf, size_t cap, size_t max_entries, ks_block* block, ks_iter** out) {
  return Guarded([&] {
    auto it = std::make_unique<ks_iter>();
    bool has_hi = (flags & KS_SCAN_HAS_HI) != 0;
    it->lo.assign(lo, lo_len);
    it->hi.assign(hi, hi_len);
    it->reverse = (flags & KS_SCAN_REVERSE) != 0;
    it->keys_only = (flags & KS_SCAN_KEYS_ONLY) != 0;
    Position(*ref->family, v, has_hi, it.get());
    int done = 0;
    ks_status st = Fill(it.get(), buf, cap, max_entries, block, &done);
    *out = st.code == KS_OK && !done ? it.release() : nullptr;
    return st;
  });
}

ks_status ks_iter_fill(ks_iter* it, char* buf, size_t cap, size_t max_entries, ks_block* block, int* done) {
  return Guarded([&] { return Fill(it, buf, cap, max_entries, block, done); });
}

void ks_iter_free(ks_iter* it) { delete it; }

ks_status ks_merge_for_test(uint8_t kind, int has_base, int partial, const char* packed, size_t len, size_t n,
                            char** big, size_t* used, int* ok) {
  return Guarded([&] {
    std::vector<Slice> values;
    auto op = NewMerge(kind);
    if (op == nullptr || !Unpack(packed, len, n, &values) || (has_base && n == 0)) {
      return MakeStatus(KS_INVALID, "merge test");
    }
    std::string result;
    if (partial) {
      *ok = op->PartialMergeMulti(Slice(), std::deque<Slice>(values.begin(), values.end()), &result, nullptr);
    } else {
      Slice existing;
      if (has_base) existing = values[0];
      std::vector<Slice> operands(values.begin() + (has_base ? 1 : 0), values.end());
      const Slice key;
      rocksdb::MergeOperator::MergeOperationInput in(key, has_base ? &existing : nullptr, operands, nullptr);
      Slice unused;
      rocksdb::MergeOperator::MergeOperationOutput out(result, unused);
      *ok = op->FullMergeV2(in, &out);
    }
    *used = result.size();
    std::memcpy(Room(nullptr, 0, result.size() + 1, big), result.data(), result.size());
    return OK();
  });
}

void ks_trim_for_test(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// What holds the threads of compactions.
static struct {
  std::mutex mu;
  std::condition_variable changed;
  int inside = 0;
  bool hold = false;
} held;

void ks_hold_compactions_for_test(int hold) {
  std::unique_lock<std::mutex> lock(held.mu);
  held.hold = hold != 0;
  held.changed.notify_all();
  if (!held.hold) {
    held.changed.wait(lock, [] { return held.inside == 0; });
    return;
  }
  rocksdb::Env* env = rocksdb::Env::Default();
  const int threads = std::max(env->GetBackgroundThreads(rocksdb::Env::LOW), 1);
  for (int i = 0; i < threads; i++) {
    env->Schedule(
        [](void*) {
          std::unique_lock<std::mutex> lock(held.mu);
          held.inside++;
          held.changed.notify_all();
          held.changed.wait(lock, [] { return !held.hold; });
          held.inside--;
          held.changed.notify_all();
        },
        nullptr, rocksdb::Env::LOW);
  }
  held.changed.wait(lock, [&] { return held.inside == threads; });
}

size_t ks_prefix_for_test(uint8_t width, const char* key, size_t len) {
  bool terminated;
  return PrefixLength(key, len, width, &terminated);
}

}  // extern "C"
