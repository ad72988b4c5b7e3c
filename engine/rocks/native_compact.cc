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

uint64_t NewestFile(const Family& f) {
  rocksdb::ColumnFamilyMetaData meta;
  f.db->GetColumnFamilyMetaData(f.handle, &meta);
  uint64_t newest = 0;
  for (auto& level : meta.levels) {
    for (auto& file : level.files) newest = std::max(newest, file.file_number);
  }
  return newest;
}

int LevelBelow(const rocksdb::ColumnFamilyMetaData& meta, int from) {
  const int levels = static_cast<int>(meta.levels.size());
  for (int to = from + 1; to < levels; to++) {
    if (!meta.levels[to].files.empty()) return to;
  }
  return from == 0 ? levels - 1 : from;
}

// Chunk returns wanted files of a level that no compaction has; others: one has
// some.
static std::vector<std::string> Chunk(const Family& f, int from, bool single, const Wanted& wanted, bool* others) {
  rocksdb::ColumnFamilyMetaData meta;
  f.db->GetColumnFamilyMetaData(f.handle, &meta);
  std::vector<std::string> files;
  uint64_t bytes = 0;
  for (auto& file : meta.levels[from].files) {
    if (!wanted(file)) continue;
    if (file.being_compacted) {
      *others = true;
    } else if (from == 0 || (bytes < kChunkBytes && !(single && bytes > 0))) {  // files of level 0 overlap
      files.push_back(file.relative_filename);
      bytes += file.size;
    }
  }
  return files;
}

Status CompactLevel(ks_store* s, const Family& f, int from, int to, bool single, const Wanted& wanted) {
  for (int busy = 0;;) {
    if (s->interrupted.load()) return Status::ShutdownInProgress("closing the store");
    if (s->cancelled.load()) return Status::Incomplete("cancelled");
    bool others = false;
    std::vector<std::string> files = Chunk(f, from, single, wanted, &others);
    if (files.empty() && !others) return Status::OK();
    Status st = Status::Aborted();
    if (!files.empty()) {
      rocksdb::CompactionOptions o;
      o.compression = rocksdb::kDisableCompressionOption;  // as the family's options say
      st = f.db->CompactFiles(o, f.handle, files, to);
    }
    if (st.ok()) {
      busy = 0;
      continue;
    }
    // A compaction of RocksDB itself has the files, or has just removed them.
    bool taken = st.IsAborted() || st.IsInvalidArgument();
    if (!taken || ++busy > kBusyTries) return st;
    s->watch->AwaitCompaction(kBusyWait);
  }
}

// Moves all files of a family that exist now down to the last level that has any,
// and writes the older ones of that level anew.
static Status CompactFamily(ks_store* s, const Family& f) {
  const uint64_t begun = NewestFile(f);
  for (int from = 0; from < f.db->NumberLevels(f.handle); from++) {
    rocksdb::ColumnFamilyMetaData meta;
    f.db->GetColumnFamilyMetaData(f.handle, &meta);
    if (meta.levels[from].files.empty()) continue;
    int to = LevelBelow(meta, from);
    // What has just been moved to the last level is new already: what is written
    // has higher numbers, so that each level ends.
    const uint64_t newest = to == from ? begun : NewestFile(f);
    Status st = CompactLevel(s, f, from, to, false,
                             [newest](const rocksdb::SstFileMetaData& file) { return file.file_number <= newest; });
    if (!st.ok() || to == from) return st;
  }
  return Status::OK();
}

}  // namespace keelstate

using namespace keelstate;

extern "C" ks_status ks_compact(ks_store* s) {
  return Guarded([&] {
    ks_status flushed = ks_flush(s);
    if (flushed.code != KS_OK) return flushed;
    for (auto& f : Live(s)) {
      Status st = CompactFamily(s, *f);
      if (!st.ok() && !st.IsColumnFamilyDropped()) return FromRocks(st);
    }
    return OK();
  });
}
