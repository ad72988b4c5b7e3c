// Compaction of a store on demand, from files alone.
//
// DB::CompactRange would do it, but it flushes first, and RocksDB 7.8 chooses
// the column families of that atomic flush before it waits for the batch that is
// being written: of a batch that is the first since the last flush, only the
// families that it had reached so far would become durable (RO1). So the flush
// is our own, and then CompactFiles, which flushes nothing.

#include <algorithm>
#include <chrono>

#include "native_internal.h"
#include "rocksdb/db.h"
#include "rocksdb/metadata.h"

namespace keelstate {

using rocksdb::Status;

// One compaction takes so many bytes of its level, so that others can run
// between two of them and its output needs little room.
static const uint64_t kChunkBytes = 512 << 20;

// The files of a level may belong to a compaction that runs: the wait for its
// end, and how often in a row it is taken.
static const auto kBusyWait = std::chrono::milliseconds(100);
static const int kBusyTries = 6000;

// Levels of one family, and where its files go.
class FamilyCompaction {
 public:
  FamilyCompaction(ks_store* s, const Family& f) : store_(s), db_(s->db.get()), family_(f) {}

  // Moves all files that exist now down to the last level that has any, and
  // writes the older ones of that level anew.
  Status Run() {
    const uint64_t begun = Newest();
    for (int from = 0; from < db_->NumberLevels(family_.handle); from++) {
      rocksdb::ColumnFamilyMetaData meta;
      db_->GetColumnFamilyMetaData(family_.handle, &meta);
      if (meta.levels[from].files.empty()) continue;
      int to = Below(meta, from);
      // What has just been moved to the last level is new already.
      Status st = Level(from, to, to == from ? begun : Newest());
      if (!st.ok() || to == from) return st;
    }
    return Status::OK();
  }

 private:
  // The highest number of a file of the family.
  uint64_t Newest() {
    rocksdb::ColumnFamilyMetaData meta;
    db_->GetColumnFamilyMetaData(family_.handle, &meta);
    uint64_t newest = 0;
    for (auto& level : meta.levels) {
      for (auto& f : level.files) newest = std::max(newest, f.file_number);
    }
    return newest;
  }

  // The next level with files; the last level for files of level 0 that are
  // alone; the level itself if it is the lowest with files.
  static int Below(const rocksdb::ColumnFamilyMetaData& meta, int from) {
    const int levels = static_cast<int>(meta.levels.size());
    for (int to = from + 1; to < levels; to++) {
      if (!meta.levels[to].files.empty()) return to;
    }
    return from == 0 ? levels - 1 : from;
  }

  // Compacts the files of a level with numbers up to newest: what is written by
  // it has higher numbers, so that this ends.
  Status Level(int from, int to, uint64_t newest) {
    for (int busy = 0;;) {
      if (store_->interrupted.load()) return Status::ShutdownInProgress("closing the store");
      std::vector<std::string> files;
      bool others = false;
      Chunk(from, newest, &files, &others);
      if (files.empty() && !others) return Status::OK();
      Status st = Status::Aborted();
      if (!files.empty()) {
        rocksdb::CompactionOptions o;
        o.compression = rocksdb::kDisableCompressionOption;  // as the family's options say
        st = db_->CompactFiles(o, family_.handle, files, to);
      }
      if (st.ok()) {
        busy = 0;
        continue;
      }
      // A compaction of RocksDB itself has the files, or has just removed them.
      bool taken = st.IsAborted() || st.IsInvalidArgument();
      if (!taken || ++busy > kBusyTries) return st;
      store_->watch->AwaitCompaction(kBusyWait);
    }
  }

  // Files of a level that no compaction has; others: some that one has.
  void Chunk(int from, uint64_t newest, std::vector<std::string>* files, bool* others) {
    rocksdb::ColumnFamilyMetaData meta;
    db_->GetColumnFamilyMetaData(family_.handle, &meta);
    uint64_t bytes = 0;
    for (auto& f : meta.levels[from].files) {
      if (f.file_number > newest) continue;
      if (f.being_compacted) {
        *others = true;
      } else if (from == 0 || bytes < kChunkBytes) {  // files of level 0 overlap
        files->push_back(f.relative_filename);
        bytes += f.size;
      }
    }
  }

  ks_store* const store_;
  rocksdb::DB* const db_;
  const Family& family_;
};

}  // namespace keelstate

using namespace keelstate;

extern "C" ks_status ks_compact(ks_store* s) {
  return Guarded([&] {
    ks_status flushed = ks_flush(s);
    if (flushed.code != KS_OK) return flushed;
    for (auto& f : Live(s)) {
      Status st = FamilyCompaction(s, *f).Run();
      if (!st.ok() && !st.IsColumnFamilyDropped()) return FromRocks(st);
    }
    return OK();
  });
}
