// What the translation units behind native.h share.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "native.h"
#include "native_parts.h"
#include "rocksdb/cache.h"
#include "rocksdb/listener.h"
#include "rocksdb/metadata.h"
#include "rocksdb/write_buffer_manager.h"

namespace keelstate {

extern std::atomic<int64_t> live_objects;

// Counted adds its bearer to ks_live_objects.
struct Counted {
  Counted() { live_objects.fetch_add(1, std::memory_order_relaxed); }
  ~Counted() { live_objects.fetch_sub(1, std::memory_order_relaxed); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
};

ks_status MakeStatus(int code, const std::string& message);
ks_status FromRocks(const rocksdb::Status& s);
inline ks_status OK() { return ks_status{KS_OK, nullptr}; }

// Guarded runs f and turns exceptions (memory exhausted) into a status, since
// none may cross into Go.
template <typename F>
ks_status Guarded(F f) {
  try {
    return f();
  } catch (const std::exception& e) {
    return MakeStatus(KS_INTERNAL, std::string("native exception: ") + e.what());
  }
}

// NewLog is what a database that is opened in dir writes its LOG with.
std::shared_ptr<rocksdb::Logger> NewLog(const std::string& dir);

// Watch follows flushes and background errors. RocksDB 7.8 does not come back from
// one as it was (DESIGN.md, Errors), so that the first stands as long as the
// database is open.
class Watch : public rocksdb::EventListener {
 public:
  void OnFlushBegin(rocksdb::DB*, const rocksdb::FlushJobInfo&) override;
  void OnFlushCompleted(rocksdb::DB*, const rocksdb::FlushJobInfo&) override;
  void OnBackgroundError(rocksdb::BackgroundErrorReason, rocksdb::Status* s) override;
  // On a full disk RocksDB would poll for space and recover by itself, whatever
  // max_bgerror_resume_count says.
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status, bool* auto_recovery) override {
    *auto_recovery = false;
  }
  // OnCompactionBegin has RocksDB's own compactions give way to everything else.
  void OnCompactionBegin(rocksdb::DB*, const rocksdb::CompactionJobInfo&) override;
  void OnCompactionCompleted(rocksdb::DB*, const rocksdb::CompactionJobInfo&) override;
  // Latch lets an error stand, unless one stands already.
  void Latch(const rocksdb::Status& s);
  // Error is what stands.
  ks_status Error();
  // AwaitCompaction returns when a compaction has ended, or after the time.
  void AwaitCompaction(std::chrono::milliseconds atMost);

  std::atomic<uint64_t> last_flush_micros{0}, flushes{0};
  std::atomic<rocksdb::DB*> db{nullptr};  // once it is open

 private:
  bool WritesStopped();

  std::atomic<int64_t> begun_{0};
  std::atomic<bool> failed_{false};
  std::mutex mu_;
  rocksdb::Status error_;
  std::condition_variable compacted_;
  uint64_t compactions_ = 0;
};

// Turns is a lock that one who waits for it gets before the present holder gets
// it again: the writer writes one batch after another.
class Turns {
 public:
  void lock() {
    std::lock_guard<std::mutex> turn(next_);
    held_.lock();
  }
  void unlock() { held_.unlock(); }

 private:
  std::mutex next_, held_;
};

// Family owns a column family handle. Flush and Compact hold it while they run
// beside a drop.
struct Family : Counted {
  Family(rocksdb::DB* d, rocksdb::ColumnFamilyHandle* h, const ks_family_options& o, std::shared_ptr<Switches> s)
      : db(d), handle(h), options(o), switches(std::move(s)) {}
  ~Family() {
    db->DestroyColumnFamilyHandle(handle).PermitUncheckedError();
  }
  rocksdb::DB* const db;
  rocksdb::ColumnFamilyHandle* const handle;
  const ks_family_options options;
  const std::shared_ptr<Switches> switches;
};

}  // namespace keelstate

struct ks_driver : keelstate::Counted {
  ks_driver_options options;
  std::shared_ptr<rocksdb::Cache> cache;
  std::shared_ptr<rocksdb::WriteBufferManager> buffers;
};

struct ks_family : keelstate::Counted {
  explicit ks_family(std::shared_ptr<keelstate::Family> f) : family(std::move(f)) {}
  const std::shared_ptr<keelstate::Family> family;
};

struct ks_snapshot : keelstate::Counted {
  rocksdb::DB* db;
  const rocksdb::Snapshot* snapshot;
};

struct ks_store : keelstate::Counted {
  ks_driver* driver;  // outlives the store
  std::shared_ptr<keelstate::Watch> watch;
  std::unique_ptr<rocksdb::DB> db;
  std::mutex mu;  // guards families, not held during writes to the database
  std::unordered_map<uint32_t, std::shared_ptr<keelstate::Family>> families;
  // Where RocksDB chooses the families of an atomic flush by itself (checkpoint),
  // it does so without waiting for the batch that is being written, of which it
  // would flush a part. Held around a checkpoint, and around each write (RO1).
  keelstate::Turns batches;
  // Held from the choice of the families to the end of a flush, and while one is
  // created: a family that the flush does not name must not have data (RO1).
  // Taken before batches.
  std::mutex flush_mu;
  // The first ends everything that runs for long, for good; the second only what
  // ks_clip does.
  std::atomic<bool> interrupted{false}, cancelled{false};
};

namespace keelstate {

// Live returns the families that exist, held while the caller works.
std::vector<std::shared_ptr<Family>> Live(ks_store* s);

rocksdb::ColumnFamilyOptions FamilyOptions(const ks_driver& d, const ks_family_options& f,
                                           const std::shared_ptr<Switches>& switches);
std::shared_ptr<Switches> NewSwitches(const ks_family_options& f);

// FlushAll names all families: RocksDB then chooses among them when no batch is
// being written. With a background error RocksDB may say that it has flushed when
// it did not even wait. The caller holds flush_mu.
ks_status FlushAll(ks_store* s);

// RocksDB says of a write of the MANIFEST by itself, but not of one for a family,
// that it failed: what runs beside it may be lost all the same.
ks_status ManifestFailed(ks_store* s, const rocksdb::Status& st);

// Which files of a level a compaction takes.
using Wanted = std::function<bool(const rocksdb::SstFileMetaData&)>;

// Compacts the wanted files of a level into a level, all together or, with single
// set, one by one: RocksDB takes all between two files that it is given. What it
// writes must not be wanted, or it does not end. It waits for compactions that
// have such files.
rocksdb::Status CompactLevel(ks_store* s, const Family& f, int from, int to, bool single, const Wanted& wanted);

// The next level with files; the last level for files of level 0 that are alone;
// the level itself if it is the lowest with files.
int LevelBelow(const rocksdb::ColumnFamilyMetaData& meta, int from);

// The highest number of a file of the family.
uint64_t NewestFile(const Family& f);

}  // namespace keelstate
