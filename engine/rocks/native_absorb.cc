// Taking over what other stores have of a family, by their files.
//
// RocksDB 7.8.3 builds a family of exported files (CreateColumnFamilyWithImport);
// each file says itself where it lies, so that those of several stores make one
// family. What it believes without looking, and what is therefore looked at here,
// is in DESIGN.md, Absorbing.

#include <algorithm>
#include <set>

#include "native_internal.h"
#include "rocksdb/comparator.h"
#include "rocksdb/convenience.h"
#include "rocksdb/db.h"
#include "rocksdb/env.h"
#include "rocksdb/sst_file_reader.h"
#include "rocksdb/table_properties.h"
#include "rocksdb/write_batch.h"

namespace keelstate {

using rocksdb::Slice;
using rocksdb::SstFileMetaData;
using rocksdb::Status;

// Clipping is the clip of one family to [lo, hi).
class Clipping {
 public:
  Clipping(ks_store* s, const Family& f, const Slice& lo, const Slice* hi) : store_(s), family_(f), lo_(lo), hi_(hi) {}

  ks_status Run() {
    // What lies outside as a whole goes first: nothing of it is compacted then.
    ks_status st = FromRocks(DropFiles());
    if (st.code != KS_OK) return st;
    // A tombstone on each side is one file of level 0 over the whole range, with
    // which everything would be compacted. Where other files of that level do so
    // anyway, one pass is enough.
    if (!Meta().levels[0].files.empty()) {
      st = DeleteOutside(true, true);
      if (st.code == KS_OK) st = FromRocks(Settle());
    } else {
      st = DeleteOutside(true, false);
      if (st.code == KS_OK) st = FromRocks(Settle());
      if (st.code == KS_OK) st = DeleteOutside(false, true);
      if (st.code == KS_OK) st = FromRocks(Settle());
    }
    return st.code == KS_OK ? Check() : st;
  }

 private:
  rocksdb::ColumnFamilyMetaData Meta() const {
    rocksdb::ColumnFamilyMetaData meta;
    family_.db->GetColumnFamilyMetaData(family_.handle, &meta);
    return meta;
  }

  bool Outside(const SstFileMetaData& f) const {
    return Slice(f.smallestkey).compare(lo_) < 0 || (hi_ != nullptr && Slice(f.largestkey).compare(*hi_) >= 0);
  }

  Status DropFiles() {
    std::vector<rocksdb::RangePtr> gone;
    gone.emplace_back(nullptr, &lo_);
    if (hi_ != nullptr) gone.emplace_back(hi_, nullptr);
    return rocksdb::DeleteFilesInRanges(family_.db, family_.handle, gone.data(), gone.size(), false);
  }

  // Deletes what files still have below lo, from hi on, or both.
  ks_status DeleteOutside(bool below, bool above) {
    std::string smallest = lo_.ToString(), largest;
    for (auto& level : Meta().levels) {
      for (auto& f : level.files) {
        smallest = std::min(smallest, f.smallestkey);
        largest = std::max(largest, f.largestkey);
      }
    }
    rocksdb::WriteBatch batch;
    Status st;
    if (below && Slice(smallest).compare(lo_) < 0) st = batch.DeleteRange(family_.handle, smallest, lo_);
    if (st.ok() && above && hi_ != nullptr && Slice(largest).compare(*hi_) >= 0) {
      largest.push_back('\0');  // the end of a range is not in it
      st = batch.DeleteRange(family_.handle, *hi_, largest);
    }
    if (!st.ok()) return FromRocks(st);
    if (batch.Count() == 0) return OK();
    rocksdb::WriteOptions wo;
    wo.disableWAL = true;
    {
      std::lock_guard<Turns> whole(store_->batches);
      st = family_.db->Write(wo, &batch);
    }
    if (!st.ok()) return FromRocks(st);
    std::lock_guard<std::mutex> flushing(store_->flush_mu);
    return FlushAll(store_);
  }

  // The numbers of the files that have range tombstones.
  Status Tombstoned(std::set<uint64_t>* numbers) const {
    rocksdb::TablePropertiesCollection all;
    Status st = family_.db->GetPropertiesOfAllTables(family_.handle, &all);
    if (!st.ok()) return st;
    for (auto& p : all) {
      if (p.second->num_range_deletions == 0) continue;
      // .../000123.sst
      numbers->insert(strtoull(p.first.substr(p.first.rfind('/') + 1).c_str(), nullptr, 10));
    }
    return Status::OK();
  }

  // Moves level 0, and what has range tombstones or sticks out, down as far as it
  // takes until nothing of it is left.
  Status Settle() {
    for (int from = 0; from < family_.db->NumberLevels(family_.handle); from++) {
      const uint64_t newest = NewestFile(family_);
      const rocksdb::ColumnFamilyMetaData meta = Meta();
      if (meta.levels[from].files.empty()) continue;
      std::set<uint64_t> tombstoned;
      Status st = Tombstoned(&tombstoned);
      if (!st.ok()) return st;
      const int to = LevelBelow(meta, from);
      st = CompactLevel(store_, family_, from, to, from > 0, [&](const SstFileMetaData& f) {
        return f.file_number <= newest && (from == 0 || Outside(f) || tombstoned.count(f.file_number) > 0);
      });
      if (!st.ok()) return st;
    }
    return Status::OK();
  }

  // Looks whether all of it is as it should be.
  ks_status Check() const {
    std::set<uint64_t> tombstoned;
    Status st = Tombstoned(&tombstoned);
    if (!st.ok()) return FromRocks(st);
    for (auto& level : Meta().levels) {
      for (auto& f : level.files) {
        if (level.level > 0 && !Outside(f) && tombstoned.count(f.file_number) == 0) continue;
        return MakeStatus(KS_INTERNAL, "clipping family " + std::to_string(family_.options.id) + " left " +
                                           f.relative_filename + " on level " + std::to_string(level.level));
      }
    }
    return OK();
  }

  ks_store* const store_;
  const Family& family_;
  const Slice lo_;
  const Slice* const hi_;
};

// Absorption is the making of one family of the files of several stores.
class Absorption {
 public:
  Absorption(ks_store* s, const ks_family_options& o, const std::string& scratch)
      : store_(s), options_(o), scratch_(scratch), switches_(NewSwitches(o)),
        family_options_(FamilyOptions(*s->driver, o, switches_)) {
    meta_.db_comparator_name = family_options_.comparator->Name();
  }

  // Links what a store has of the family, if it has it, into the scratch
  // directory, and checks it.
  ks_status Add(ks_store* from) {
    std::shared_ptr<Family> f = Find(from);
    if (f == nullptr) return OK();
    Part part;
    {
      std::lock_guard<std::mutex> flushing(from->flush_mu);
      ks_status st = FlushAll(from);
      if (st.code != KS_OK) return st;
      // What a compaction makes superfluous meanwhile stays until it is linked.
      Status held = f->db->DisableFileDeletions();
      if (!held.ok()) return FromRocks(held);
      st = Link(*f, &part);
      Status released = f->db->EnableFileDeletions(false);
      if (st.code != KS_OK) return st;
      if (!released.ok()) return FromRocks(released);
    }
    if (!part.any) return OK();
    for (auto& p : parts_) {
      if (part.smallest > p.largest || part.largest < p.smallest) continue;
      return MakeStatus(KS_CONFLICT, "two stores have keys of family " + std::to_string(options_.id) + " in one range");
    }
    parts_.push_back(part);
    return OK();
  }

  size_t files() const { return meta_.files.size(); }

  // Puts the family in the place of the one that is there.
  ks_status Install(const char* name, int* dropped, ks_family** out) {
    std::lock_guard<std::mutex> flushing(store_->flush_mu);
    ks_status failed = store_->watch->Error();
    if (failed.code != KS_OK) return failed;
    if (std::shared_ptr<Family> old = Find(store_)) {
      Status st = store_->db->DropColumnFamily(old->handle);
      if (!st.ok()) return ManifestFailed(store_, st);
      *dropped = 1;
      std::lock_guard<std::mutex> lock(store_->mu);
      store_->families.erase(options_.id);
    }
    rocksdb::ImportColumnFamilyOptions io;
    io.move_files = true;  // hard links; those in the scratch directory go
    rocksdb::ColumnFamilyHandle* h = nullptr;
    Status st = store_->db->CreateColumnFamilyWithImport(family_options_, name, io, meta_, &h);
    if (!st.ok()) return ManifestFailed(store_, st);
    auto f = std::make_shared<Family>(store_->db.get(), h, options_, switches_);
    *out = new ks_family(f);
    std::lock_guard<std::mutex> lock(store_->mu);
    store_->families[options_.id] = std::move(f);
    return OK();
  }

 private:
  struct Part {
    std::string smallest, largest;
    bool any = false;
  };

  std::shared_ptr<Family> Find(ks_store* s) const {
    std::lock_guard<std::mutex> lock(s->mu);
    auto it = s->families.find(options_.id);
    return it == s->families.end() ? nullptr : it->second;
  }

  ks_status Link(const Family& f, Part* part) {
    rocksdb::ColumnFamilyMetaData meta;
    f.db->GetColumnFamilyMetaData(f.handle, &meta);
    for (auto& level : meta.levels) {
      const SstFileMetaData* before = nullptr;
      for (auto& file : level.files) {
        if (level.level == 0) return MakeStatus(KS_CONFLICT, file.relative_filename + " is on level 0");
        if (before != nullptr && file.smallestkey <= before->largestkey) {
          // The versions of one key may lie in two files, which no import takes.
          return MakeStatus(file.smallestkey == before->largestkey ? KS_UNSUPPORTED : KS_CORRUPT,
                            file.relative_filename + " overlaps the file before it on its level");
        }
        before = &file;
        ks_status st = LinkFile(f, file, level.level);
        if (st.code != KS_OK) return st;
        part->smallest = part->any ? std::min(part->smallest, file.smallestkey) : file.smallestkey;
        part->largest = part->any ? std::max(part->largest, file.largestkey) : file.largestkey;
        part->any = true;
      }
    }
    return OK();
  }

  ks_status LinkFile(const Family& f, const SstFileMetaData& file, int level) {
    const std::string name = std::to_string(meta_.files.size()) + ".sst";
    const std::string path = scratch_ + "/" + name;
    Status st = f.db->GetEnv()->LinkFile(file.directory + "/" + file.relative_filename, path);
    if (!st.ok()) return FromRocks(st);
    ks_status checked = CheckFile(path, file);
    if (checked.code != KS_OK) return checked;
    rocksdb::LiveFileMetaData m;
    static_cast<SstFileMetaData&>(m) = file;
    m.relative_filename = name;
    m.name = "/" + name;
    m.directory = m.db_path = scratch_;
    m.column_family_name = f.handle->GetName();
    m.level = level;
    meta_.files.push_back(std::move(m));
    return OK();
  }

  // Checks a file itself: its checksums, and that it was written for such a family.
  ks_status CheckFile(const std::string& path, const SstFileMetaData& file) const {
    rocksdb::SstFileReader reader(rocksdb::Options(store_->db->GetDBOptions(), family_options_));
    Status st = reader.Open(path);
    if (st.ok()) st = reader.VerifyChecksum();
    if (!st.ok()) return FromRocks(st);
    auto p = reader.GetTableProperties();
    const std::string merge =
        family_options_.merge_operator == nullptr ? "nullptr" : family_options_.merge_operator->Name();
    const char* wrong = nullptr;
    if (p->comparator_name != family_options_.comparator->Name()) wrong = "comparator";
    if (p->merge_operator_name != merge) wrong = "merge operator";
    if (p->num_range_deletions != 0) wrong = "number of range tombstones";
    if (p->num_entries == 0) wrong = "number of entries";
    if (file.smallestkey > file.largestkey) wrong = "key range";
    return wrong == nullptr ? OK() : MakeStatus(KS_CONFLICT, "the " + std::string(wrong) + " of " + file.relative_filename);
  }

  ks_store* const store_;
  const ks_family_options options_;
  const std::string scratch_;
  const std::shared_ptr<Switches> switches_;
  const rocksdb::ColumnFamilyOptions family_options_;
  rocksdb::ExportImportFilesMetaData meta_;
  std::vector<Part> parts_;
};

}  // namespace keelstate

using namespace keelstate;

extern "C" {

ks_status ks_clip(ks_store* s, uint32_t id, const char* lo, size_t lo_len, const char* hi, size_t hi_len) {
  return Guarded([&] {
    ks_status st = ks_flush(s);
    if (st.code != KS_OK) return st;
    std::shared_ptr<Family> f;
    {
      std::lock_guard<std::mutex> lock(s->mu);
      auto it = s->families.find(id);
      if (it == s->families.end()) return MakeStatus(KS_NO_FAMILY, "family " + std::to_string(id));
      f = it->second;
    }
    const Slice end(hi, hi_len);
    return Clipping(s, *f, lo_len == 0 ? Slice() : Slice(lo, lo_len), hi == nullptr ? nullptr : &end).Run();
  });
}

void ks_set_cancelled(ks_store* s, int cancelled) { s->cancelled.store(cancelled != 0); }

ks_status ks_absorb(ks_store* s, const ks_family_options* o, const char* name, ks_store** others, size_t n,
                    const char* scratch, int* dropped, ks_family** out) {
  return Guarded([&] {
    Absorption a(s, *o, scratch);
    ks_status st = a.Add(s);
    const size_t own = a.files();
    for (size_t i = 0; st.code == KS_OK && i < n; i++) st = a.Add(others[i]);
    if (st.code != KS_OK || a.files() == own) return st;
    return a.Install(name, dropped, out);
  });
}

}  // extern "C"
