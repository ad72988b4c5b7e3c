// Stores: options, open and close, families, batches, flush, checkpoint.

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "native_internal.h"
#include "rocksdb/convenience.h"
#include "rocksdb/file_checksum.h"
#include "rocksdb/utilities/checkpoint.h"
#include "rocksdb/write_batch.h"

namespace keelstate {

using rocksdb::Slice;
using rocksdb::Status;

std::atomic<int64_t> live_objects{0};

ks_status MakeStatus(int code, const std::string& message) {
  return ks_status{code, strdup(message.c_str())};
}

ks_status FromRocks(const Status& s) {
  if (s.ok()) return OK();
  const std::string text = s.ToString();
  if (s.IsCorruption()) return MakeStatus(KS_CORRUPT, text);
  if (s.IsNoSpace()) return MakeStatus(KS_NO_SPACE, text);
  // RocksDB opens no file but those that its own files name: one that is not
  // there is gone, or its name has been damaged. The disk has not failed.
  if (s.IsPathNotFound()) return MakeStatus(KS_CORRUPT, text);
  if (s.IsIOError()) {
    bool lock = text.find("lock hold by current process") != std::string::npos ||
                text.find("While lock file") != std::string::npos;
    return MakeStatus(lock ? KS_LOCKED : KS_IO, text);
  }
  if (s.IsShutdownInProgress() || s.IsManualCompactionPaused()) return MakeStatus(KS_SHUTDOWN, text);
  if (s.IsIncomplete()) return MakeStatus(KS_CANCELLED, text);
  if (s.IsColumnFamilyDropped()) return MakeStatus(KS_NO_FAMILY, text);
  if (s.IsInvalidArgument()) return MakeStatus(KS_INVALID, text);
  if (s.IsNotSupported()) return MakeStatus(KS_UNSUPPORTED, text);
  return MakeStatus(KS_INTERNAL, text);
}

static int64_t NowMicros() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

void Watch::OnFlushBegin(rocksdb::DB*, const rocksdb::FlushJobInfo&) { begun_.store(NowMicros()); }

void Watch::OnFlushCompleted(rocksdb::DB*, const rocksdb::FlushJobInfo&) {
  last_flush_micros.store(static_cast<uint64_t>(std::max<int64_t>(NowMicros() - begun_.load(), 1)));
  flushes.fetch_add(1);
}

void Watch::OnBackgroundError(rocksdb::BackgroundErrorReason reason, Status* s) {
  if (reason == rocksdb::BackgroundErrorReason::kCompaction && s->IsNoSpace() && !WritesStopped()) {
    // It removes what it has written and is tried again by RocksDB; as an error it
    // would stop flushes, and one that has just written its files for good. Where
    // writes wait for it, though, flushes wait for the writes, for as long as the
    // disk is full: there it stands (RO9).
    *s = Status::OK();
    return;
  }
  Latch(*s);
}

bool Watch::WritesStopped() {
  rocksdb::DB* d = db.load();
  uint64_t stopped = 0;
  return d != nullptr && d->GetIntProperty(rocksdb::DB::Properties::kIsWriteStopped, &stopped) && stopped != 0;
}

void Watch::Latch(const Status& s) {
  std::lock_guard<std::mutex> lock(mu_);
  if (!error_.ok()) return;
  error_ = s;
  failed_.store(true);
}

// How much nicer than the process the threads of compactions are. A flush at a
// barrier of a checkpoint starts compactions on every replica at once; with equal
// shares of the processors writes took ten times as long meanwhile. Compactions
// that get too little of them slow the writes down by RocksDB's own rules.
static const int kCompactionNiceness = 10;

void Watch::OnCompactionBegin(rocksdb::DB*, const rocksdb::CompactionJobInfo& info) {
  // One that was asked for runs on the caller's thread, which is not ours.
  if (info.compaction_reason == rocksdb::CompactionReason::kManualCompaction) return;
  // The pool's threads run nothing else, and start others at the opening only: none
  // inherits this.
  static thread_local bool lowered = false;
  if (lowered) return;
  lowered = true;
  errno = 0;
  const int nice = getpriority(PRIO_PROCESS, static_cast<id_t>(getpid()));
  if (nice == -1 && errno != 0) return;
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), std::min(nice + kCompactionNiceness, 19));
}

void Watch::OnCompactionCompleted(rocksdb::DB*, const rocksdb::CompactionJobInfo&) {
  std::lock_guard<std::mutex> lock(mu_);
  compactions_++;
  compacted_.notify_all();
}

void Watch::AwaitCompaction(std::chrono::milliseconds atMost) {
  std::unique_lock<std::mutex> lock(mu_);
  const uint64_t before = compactions_;
  compacted_.wait_for(lock, atMost, [&] { return compactions_ != before; });
}

ks_status Watch::Error() {
  if (!failed_.load(std::memory_order_relaxed)) return OK();
  std::lock_guard<std::mutex> lock(mu_);
  return FromRocks(error_);
}

static bool Supports(rocksdb::CompressionType t) {
  auto all = rocksdb::GetSupportedCompressions();
  return std::find(all.begin(), all.end(), t) != all.end();
}

// LZ4 for L0 and the first level below, zstd further down, each where the
// library has it.
static std::vector<rocksdb::CompressionType> Compression(int levels) {
  static const auto fast =
      Supports(rocksdb::kLZ4Compression) ? rocksdb::kLZ4Compression : rocksdb::kNoCompression;
  static const auto dense = Supports(rocksdb::kZSTD) ? rocksdb::kZSTD : fast;
  std::vector<rocksdb::CompressionType> c(levels, dense);
  c[0] = c[1] = fast;
  return c;
}

static rocksdb::DBOptions DatabaseOptions(const ks_driver& d, const char* dir, std::shared_ptr<Watch> watch) {
  rocksdb::DBOptions o;
  o.create_if_missing = true;
  o.paranoid_checks = true;
  o.atomic_flush = true;
  // One writer; the hash memtable takes no more.
  o.allow_concurrent_memtable_write = false;
  o.enable_pipelined_write = false;
  // Close loses what was not flushed, like a crash: the Raft log has it.
  o.avoid_flush_during_shutdown = true;
  // RocksDB never goes on after an error. See Watch::OnErrorRecoveryBegin too.
  o.max_bgerror_resume_count = 0;
  o.write_buffer_manager = d.buffers;
  o.max_open_files = d.options.max_open_files;
  o.max_file_opening_threads = 1;
  o.max_background_jobs = d.options.background_jobs;
  o.max_subcompactions = 1;
  o.bytes_per_sync = 1 << 20;
  o.max_manifest_file_size = 64 << 20;
  o.file_checksum_gen_factory = rocksdb::GetFileChecksumGenCrc32cFactory();
  o.info_log = NewLog(dir);
  o.info_log_level = rocksdb::WARN_LEVEL;
  o.keep_log_file_num = 2;  // of those that an earlier version has left
  o.stats_dump_period_sec = 0;
  o.stats_persist_period_sec = 0;
  o.skip_stats_update_on_db_open = true;
  o.listeners.push_back(std::move(watch));
  return o;
}

rocksdb::ColumnFamilyOptions FamilyOptions(const ks_driver& d, const ks_family_options& f,
                                           const std::shared_ptr<Switches>& switches) {
  rocksdb::ColumnFamilyOptions o;
  o.write_buffer_size = f.buffer_bytes != 0 ? f.buffer_bytes : d.options.family_buffer_bytes;
  o.arena_block_size = std::min<size_t>(o.write_buffer_size / 8, 128 << 10);
  o.max_write_buffer_number = 3;
  o.max_successive_merges = d.options.max_successive_merges;
  o.target_file_size_base = 16 << 20;
  o.max_bytes_for_level_base = 64 << 20;
  o.level_compaction_dynamic_level_bytes = true;
  o.compression_per_level = Compression(o.num_levels);
  if (f.group_width != 0) o.prefix_extractor = NewPrefix(f.group_width);
  o.merge_operator = NewMerge(f.merge);
  o.memtable_factory = NewMemtables(switches, o.write_buffer_size);
  o.table_factory = NewTables(switches, d.cache, f.use == kPoint);
  return o;
}

std::shared_ptr<Switches> NewSwitches(const ks_family_options& f) {
  auto s = std::make_shared<Switches>();
  s->use.store(f.use);
  s->filter.store(f.filter);
  return s;
}

static ks_status BadBatch(const char* what) { return MakeStatus(KS_INVALID, std::string("packed batch: ") + what); }

// Reads the packed batch of engine/batch.go.
class BatchReader {
 public:
  BatchReader(const char* p, size_t n) : p_(p), end_(p + n) {}
  bool AtEnd() const { return p_ == end_; }
  bool Next(uint8_t* kind, uint32_t* family, Slice* key, Slice* value) {
    if (static_cast<size_t>(end_ - p_) < 13) return false;
    uint32_t kl, vl;
    *kind = static_cast<uint8_t>(p_[0]);
    std::memcpy(family, p_ + 1, 4);
    std::memcpy(&kl, p_ + 5, 4);
    std::memcpy(&vl, p_ + 9, 4);
    p_ += 13;
    if (static_cast<uint64_t>(end_ - p_) < uint64_t{kl} + vl) return false;
    *key = Slice(p_, kl);
    *value = Slice(p_ + kl, vl);
    p_ += uint64_t{kl} + vl;
    return true;
  }

 private:
  const char* p_;
  const char* const end_;
};

static ks_status AddMerge(rocksdb::WriteBatch* batch, const Family& f, const Slice& key, const Slice& operand) {
  if (f.options.merge == kMergeNone) {
    return MakeStatus(KS_INVALID, "merge in family " + std::to_string(f.options.id) + ", which has no merge kind");
  }
  // A bad operand would stop every later flush of the family: refuse it here.
  switch (CheckOperand(f.options.merge, operand)) {
    case Operand::kBad:
      return MakeStatus(KS_BAD_OPERAND, "merge operand in family " + std::to_string(f.options.id));
    case Operand::kUnknownVersion:
      return MakeStatus(KS_OPERAND_VERSION, "merge operand in family " + std::to_string(f.options.id));
    case Operand::kGood:
      break;
  }
  return FromRocks(batch->Merge(f.handle, key, operand));
}

static ks_status AddOperation(rocksdb::WriteBatch* batch, const Family& f, uint8_t kind, const Slice& key,
                              const Slice& value) {
  switch (kind) {
    case 1:
      return FromRocks(batch->Put(f.handle, key, value));
    case 2:
      return FromRocks(batch->Delete(f.handle, key));
    case 3:  // an empty range must not reach RocksDB
      return key.compare(value) < 0 ? FromRocks(batch->DeleteRange(f.handle, key, value)) : OK();
    case 4:
      return AddMerge(batch, f, key, value);
    default:
      return BadBatch("unknown kind of operation");
  }
}

static ks_status Build(ks_store* s, const char* p, size_t n, rocksdb::WriteBatch* batch) {
  std::lock_guard<std::mutex> lock(s->mu);
  BatchReader reader(p, n);
  uint32_t last = 0;
  const Family* f = nullptr;
  while (!reader.AtEnd()) {
    uint8_t kind;
    uint32_t id;
    Slice key, value;
    if (!reader.Next(&kind, &id, &key, &value)) return BadBatch("cut short");
    if (f == nullptr || id != last) {
      auto it = s->families.find(id);
      if (it == s->families.end()) return MakeStatus(KS_NO_FAMILY, "family " + std::to_string(id));
      f = it->second.get();
      last = id;
    }
    ks_status st = AddOperation(batch, *f, kind, key, value);
    if (st.code != KS_OK) return st;
  }
  return OK();
}

std::vector<std::shared_ptr<Family>> Live(ks_store* s) {
  std::lock_guard<std::mutex> lock(s->mu);
  std::vector<std::shared_ptr<Family>> v;
  for (auto& f : s->families) v.push_back(f.second);
  return v;
}

// RocksDB says of a write of the MANIFEST by itself, but not of one for a family,
// that it failed: what runs beside it may be lost all the same.
ks_status ManifestFailed(ks_store* s, const Status& st) {
  if (st.IsIOError()) s->watch->Latch(st);
  return FromRocks(st);
}

ks_status FlushAll(ks_store* s) {
  ks_status failed = s->watch->Error();
  if (failed.code != KS_OK) return failed;
  auto live = Live(s);
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  for (auto& f : live) handles.push_back(f->handle);
  rocksdb::FlushOptions fo;
  fo.wait = true;
  fo.allow_write_stall = true;
  Status st = s->db->Flush(fo, handles);
  return st.ok() ? s->watch->Error() : FromRocks(st);
}

static std::vector<std::string> SplitNames(const char* names, size_t n) {
  std::vector<std::string> v;
  for (size_t i = 0; i < n; i++) {
    v.emplace_back(names);
    names += v.back().size() + 1;
  }
  return v;
}

}  // namespace keelstate

using namespace keelstate;

extern "C" {

int64_t ks_live_objects(void) { return live_objects.load(); }

ks_driver* ks_driver_new(const ks_driver_options* o) {
  auto d = std::make_unique<ks_driver>();
  d->options = *o;
  rocksdb::LRUCacheOptions c;
  c.capacity = o->cache_bytes;
  c.high_pri_pool_ratio = 0.3;
  d->cache = rocksdb::NewLRUCache(c);
  // Memtables are charged to the cache, so that both share one budget.
  d->buffers = std::make_shared<rocksdb::WriteBufferManager>(o->write_buffer_bytes, d->cache);
  return d.release();
}

void ks_driver_free(ks_driver* d) { delete d; }
uint64_t ks_driver_cache_usage(ks_driver* d) { return d->cache->GetUsage(); }
uint64_t ks_driver_memtable_usage(ks_driver* d) { return d->buffers->memory_usage(); }

// Join gives out names, each ended by a zero byte.
static void Join(const std::vector<std::string>& v, char** names, size_t* len) {
  std::string all;
  for (auto& n : v) all.append(n.c_str(), n.size() + 1);
  *len = all.size();
  *names = static_cast<char*>(malloc(all.size() + 1));
  if (*names == nullptr) throw std::bad_alloc();
  std::memcpy(*names, all.data(), all.size());
}

ks_status ks_list_families(const char* dir, char** names, size_t* len) {
  return Guarded([&] {
    std::vector<std::string> v;
    Status st = rocksdb::DB::ListColumnFamilies(rocksdb::DBOptions(), dir, &v);
    if (!st.ok()) return FromRocks(st);
    Join(v, names, len);
    return OK();
  });
}

ks_status ks_open(ks_driver* d, const char* dir, int read_only, const ks_family_options* o, const char* names,
                  size_t n, ks_family** families, ks_store** out) {
  return Guarded([&] {
    auto s = std::make_unique<ks_store>();
    s->driver = d;
    s->watch = std::make_shared<Watch>();
    std::vector<rocksdb::ColumnFamilyDescriptor> descriptors;
    std::vector<std::shared_ptr<Switches>> switches;
    std::vector<std::string> split = SplitNames(names, n);
    for (size_t i = 0; i < n; i++) {
      switches.push_back(NewSwitches(o[i]));
      descriptors.emplace_back(split[i], FamilyOptions(*d, o[i], switches[i]));
    }
    std::vector<rocksdb::ColumnFamilyHandle*> handles;
    rocksdb::DB* db = nullptr;
    rocksdb::DBOptions dbo = DatabaseOptions(*d, dir, s->watch);
    Status st = read_only ? rocksdb::DB::OpenForReadOnly(dbo, dir, descriptors, &handles, &db)
                          : rocksdb::DB::Open(dbo, dir, descriptors, &handles, &db);
    if (!st.ok()) return FromRocks(st);
    s->db.reset(db);
    s->watch->db.store(db);
    for (size_t i = 0; i < n; i++) {
      auto f = std::make_shared<Family>(db, handles[i], o[i], switches[i]);
      s->families[o[i].id] = f;
      families[i] = new ks_family(f);
    }
    *out = s.release();
    return OK();
  });
}

void ks_interrupt(ks_store* s) {
  s->interrupted.store(true);
  s->db->DisableManualCompaction();
  rocksdb::CancelAllBackgroundWork(s->db.get(), false);
}

ks_status ks_close(ks_store* s) {
  return Guarded([&] {
    std::unique_ptr<ks_store> owned(s);
    s->families.clear();
    return FromRocks(s->db->Close());
  });
}

ks_status ks_create_family(ks_store* s, const ks_family_options* o, const char* name, ks_family** out) {
  return Guarded([&] {
    auto switches = NewSwitches(*o);
    rocksdb::ColumnFamilyHandle* h = nullptr;
    std::lock_guard<std::mutex> flushing(s->flush_mu);
    ks_status failed = s->watch->Error();
    if (failed.code != KS_OK) return failed;
    Status st = s->db->CreateColumnFamily(FamilyOptions(*s->driver, *o, switches), name, &h);
    if (!st.ok()) return ManifestFailed(s, st);
    auto f = std::make_shared<Family>(s->db.get(), h, *o, switches);
    *out = new ks_family(f);
    std::lock_guard<std::mutex> lock(s->mu);
    s->families[o->id] = std::move(f);
    return OK();
  });
}

ks_status ks_drop_family(ks_store* s, uint32_t id) {
  return Guarded([&] {
    std::shared_ptr<Family> f;
    {
      std::lock_guard<std::mutex> lock(s->mu);
      auto it = s->families.find(id);
      if (it == s->families.end()) return OK();
      f = it->second;
    }
    ks_status failed = s->watch->Error();
    if (failed.code != KS_OK) return failed;
    Status st = s->db->DropColumnFamily(f->handle);
    if (!st.ok()) return ManifestFailed(s, st);
    std::lock_guard<std::mutex> lock(s->mu);
    s->families.erase(id);
    return OK();
  });
}

void ks_family_release(ks_family* f) { delete f; }
void ks_family_set_use(ks_family* f, uint8_t use) { f->family->switches->use.store(use); }
void ks_family_set_filter(ks_family* f, uint8_t mode) { f->family->switches->filter.store(mode); }

ks_status ks_write(ks_store* s, const char* batch, size_t len) {
  return Guarded([&] {
    ks_status st = s->watch->Error();
    if (st.code != KS_OK) return st;
    rocksdb::WriteBatch wb(len + 64);
    st = Build(s, batch, len, &wb);
    if (st.code != KS_OK || wb.Count() == 0) return st;
    rocksdb::WriteOptions wo;
    wo.disableWAL = true;
    std::lock_guard<Turns> whole(s->batches);
    Status written = s->db->Write(wo, &wb);
    if (written.ok()) return OK();
    // One that waited for a compaction says only that it did not wait any longer.
    st = s->watch->Error();
    return st.code != KS_OK ? st : FromRocks(written);
  });
}

// NothingInMemory fails if a family has entries that are not in its files, which
// is only right after a flush beside which nobody writes.
static ks_status NothingInMemory(ks_store* s) {
  using Properties = rocksdb::DB::Properties;
  for (auto& f : Live(s)) {
    for (auto& name : {Properties::kNumEntriesActiveMemTable, Properties::kNumImmutableMemTable}) {
      uint64_t n = 0;
      if (s->db->GetIntProperty(f->handle, name, &n) && n == 0) continue;
      return MakeStatus(KS_INTERNAL, "a flush left " + std::to_string(n) + " of " + name + " in family " +
                                         std::to_string(f->options.id));
    }
  }
  return OK();
}

ks_status ks_flush(ks_store* s) {
  return Guarded([&] {
    std::lock_guard<std::mutex> flushing(s->flush_mu);
    return FlushAll(s);
  });
}

ks_status ks_checkpoint(ks_store* s, const char* dir) {
  return Guarded([&] {
    rocksdb::Checkpoint* raw = nullptr;
    Status st = rocksdb::Checkpoint::Create(s->db.get(), &raw);
    std::unique_ptr<rocksdb::Checkpoint> c(raw);
    if (!st.ok()) return FromRocks(st);
    std::lock_guard<std::mutex> flushing(s->flush_mu);
    // Most is flushed beside the writer, which then waits for little.
    ks_status flushed = FlushAll(s);
    if (flushed.code != KS_OK) return flushed;
    std::lock_guard<Turns> whole(s->batches);
    // The rest too: RocksDB's own flush, which there is a log size of 0 for, would
    // wait for as long as it would make writes slow, and they wait for it (RO9).
    flushed = FlushAll(s);
    if (flushed.code != KS_OK) return flushed;
    st = c->CreateCheckpoint(dir, 0);
    if (!st.ok()) return FromRocks(st);
    ks_status failed = s->watch->Error();
    return failed.code != KS_OK ? failed : NothingInMemory(s);
  });
}

ks_status ks_verify(ks_store* s) {
  return Guarded([&] {
    rocksdb::ReadOptions ro;
    ro.fill_cache = false;
    Status st = s->db->VerifyFileChecksums(ro);
    return FromRocks(st.ok() ? s->db->VerifyChecksum(ro) : st);
  });
}

ks_status ks_live_files(ks_store* s, char** names, size_t* len, uint64_t* manifest_size) {
  return Guarded([&] {
    std::vector<std::string> v;
    Status st = s->db->GetLiveFiles(v, manifest_size, false);
    if (!st.ok()) return FromRocks(st);
    Join(v, names, len);
    return OK();
  });
}

ks_status ks_verify_file(ks_store* s, const char* path) {
  return Guarded([&] {
    rocksdb::Options o(s->db->GetDBOptions(), rocksdb::ColumnFamilyOptions());
    rocksdb::ReadOptions ro;
    ro.fill_cache = false;
    ro.verify_checksums = true;
    return FromRocks(rocksdb::VerifySstFileChecksum(o, rocksdb::EnvOptions(), ro, path));
  });
}

ks_status ks_background_error(ks_store* s) { return s->watch->Error(); }
uint64_t ks_last_flush_micros(ks_store* s) { return s->watch->last_flush_micros.load(); }
uint64_t ks_flush_count(ks_store* s) { return s->watch->flushes.load(); }

ks_status ks_stats(ks_family* ref, ks_family_stats* out) {
  return Guarded([&] {
    const Family& f = *ref->family;
    auto get = [&](const std::string& name) {
      uint64_t v = 0;
      return f.db->GetIntProperty(f.handle, name, &v) ? v : 0;
    };
    out->keys = get(rocksdb::DB::Properties::kEstimateNumKeys);
    out->disk_bytes = get(rocksdb::DB::Properties::kLiveSstFilesSize);
    out->memtable_bytes = get(rocksdb::DB::Properties::kSizeAllMemTables);
    out->pending_compaction = get(rocksdb::DB::Properties::kEstimatePendingCompactionBytes);
    out->write_stopped = get(rocksdb::DB::Properties::kIsWriteStopped);
    out->delayed_rate = get(rocksdb::DB::Properties::kActualDelayedWriteRate);
    std::string files;
    f.db->GetProperty(f.handle, rocksdb::DB::Properties::kNumFilesAtLevelPrefix + "0", &files);
    out->level0_files = strtoull(files.c_str(), nullptr, 10);
    return OK();
  });
}

}  // extern "C"
