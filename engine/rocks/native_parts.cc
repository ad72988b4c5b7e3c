// Prefix transform, memtables, filters and tables of a family.

#include "native_parts.h"

#include <algorithm>

#include "rocksdb/cache.h"
#include "rocksdb/filter_policy.h"

namespace keelstate {

using rocksdb::Slice;

size_t PrefixLength(const char* key, size_t len, size_t group_width, bool* terminated) {
  for (size_t i = group_width; i + 1 < len; i++) {
    if (key[i] != '\0') continue;
    if (key[i + 1] == '\x01') {
      *terminated = true;
      return i + 2;
    }
    if (key[i + 1] == '\xff') i++;
  }
  *terminated = false;
  return len;
}

namespace {

class Prefix : public rocksdb::SliceTransform {
 public:
  explicit Prefix(size_t width) : width_(width), name_("keelstate.prefix.w" + std::to_string(width) + ".v1") {}
  const char* Name() const override { return name_.c_str(); }
  Slice Transform(const Slice& key) const override {
    bool terminated;
    return Slice(key.data(), PrefixLength(key.data(), key.size(), width_, &terminated));
  }
  // Total: every key has a prefix, if need be itself.
  bool InDomain(const Slice&) const override { return true; }

 private:
  const size_t width_;
  const std::string name_;
};

class Memtables : public rocksdb::MemTableRepFactory {
 public:
  Memtables(std::shared_ptr<Switches> switches, size_t buckets)
      : switches_(std::move(switches)),
        hash_(rocksdb::NewHashLinkListRepFactory(buckets, 0, 0, false)) {}

  using MemTableRepFactory::CreateMemTableRep;
  rocksdb::MemTableRep* CreateMemTableRep(const rocksdb::MemTableRep::KeyComparator& cmp,
                                          rocksdb::Allocator* allocator, const rocksdb::SliceTransform* prefix,
                                          rocksdb::Logger* logger) override {
    if (prefix != nullptr && switches_->use.load(std::memory_order_relaxed) == kPoint) {
      return hash_->CreateMemTableRep(cmp, allocator, prefix, logger);
    }
    return skip_.CreateMemTableRep(cmp, allocator, prefix, logger);
  }
  const char* Name() const override { return "keelstate.memtables.v1"; }
  // What both kinds can do: one writer, no check for duplicates.
  bool IsInsertConcurrentlySupported() const override { return false; }
  bool CanHandleDuplicatedKey() const override { return false; }

 private:
  std::shared_ptr<Switches> switches_;
  rocksdb::SkipListFactory skip_;
  std::unique_ptr<rocksdb::MemTableRepFactory> hash_;
};

// Filters delegates to the built-in Bloom filter, whose files it can read
// whatever the switch says now.
class Filters : public rocksdb::FilterPolicy {
 public:
  explicit Filters(std::shared_ptr<Switches> switches)
      : switches_(std::move(switches)), bloom_(rocksdb::NewBloomFilterPolicy(10)) {}
  const char* Name() const override { return "keelstate.filters.v1"; }
  const char* CompatibilityName() const override { return bloom_->CompatibilityName(); }
  rocksdb::FilterBitsBuilder* GetBuilderWithContext(const rocksdb::FilterBuildingContext& context) const override {
    if (switches_->filter.load(std::memory_order_relaxed) == kFilterNone) return nullptr;
    return bloom_->GetBuilderWithContext(context);
  }
  rocksdb::FilterBitsReader* GetFilterBitsReader(const Slice& contents) const override {
    return bloom_->GetFilterBitsReader(contents);
  }

 private:
  std::shared_ptr<Switches> switches_;
  std::unique_ptr<const rocksdb::FilterPolicy> bloom_;
};

// Tables builds each SST either with whole keys (and prefixes) in its filter or
// with prefixes alone. An SST says itself what its filter has, so one reader
// serves both.
class Tables : public rocksdb::TableFactory {
 public:
  Tables(std::shared_ptr<Switches> switches, rocksdb::BlockBasedTableOptions o) : switches_(std::move(switches)) {
    o.whole_key_filtering = true;
    whole_.reset(rocksdb::NewBlockBasedTableFactory(o));
    o.whole_key_filtering = false;
    prefix_.reset(rocksdb::NewBlockBasedTableFactory(o));
  }
  const char* Name() const override { return "keelstate.tables.v1"; }
  const rocksdb::Customizable* Inner() const override { return whole_.get(); }
  rocksdb::Status PrepareOptions(const rocksdb::ConfigOptions& o) override {
    rocksdb::Status s = whole_->PrepareOptions(o);
    return s.ok() ? prefix_->PrepareOptions(o) : s;
  }
  rocksdb::Status ValidateOptions(const rocksdb::DBOptions& db, const rocksdb::ColumnFamilyOptions& cf) const override {
    rocksdb::Status s = whole_->ValidateOptions(db, cf);
    return s.ok() ? prefix_->ValidateOptions(db, cf) : s;
  }
  using TableFactory::NewTableReader;
  rocksdb::Status NewTableReader(const rocksdb::ReadOptions& ro, const rocksdb::TableReaderOptions& o,
                                 std::unique_ptr<rocksdb::RandomAccessFileReader>&& file, uint64_t size,
                                 std::unique_ptr<rocksdb::TableReader>* reader, bool prefetch) const override {
    return whole_->NewTableReader(ro, o, std::move(file), size, reader, prefetch);
  }
  rocksdb::TableBuilder* NewTableBuilder(const rocksdb::TableBuilderOptions& o,
                                         rocksdb::WritableFileWriter* file) const override {
    bool prefix = switches_->filter.load(std::memory_order_relaxed) == kFilterPrefix;
    return (prefix ? prefix_ : whole_)->NewTableBuilder(o, file);
  }
  bool IsDeleteRangeSupported() const override { return true; }

 private:
  std::shared_ptr<Switches> switches_;
  std::unique_ptr<rocksdb::TableFactory> whole_, prefix_;
};

}  // namespace

std::shared_ptr<const rocksdb::SliceTransform> NewPrefix(size_t group_width) {
  return std::make_shared<Prefix>(group_width);
}

std::shared_ptr<rocksdb::MemTableRepFactory> NewMemtables(std::shared_ptr<Switches> switches, size_t buffer_bytes) {
  // 1/64 of the buffer for the bucket array, so that many small families stay
  // small.
  size_t buckets = std::min<size_t>(std::max<size_t>(buffer_bytes / 512, 512), 1 << 16);
  return std::make_shared<Memtables>(std::move(switches), buckets);
}

std::shared_ptr<rocksdb::TableFactory> NewTables(std::shared_ptr<Switches> switches,
                                                 std::shared_ptr<rocksdb::Cache> cache, bool point) {
  rocksdb::BlockBasedTableOptions o;
  o.block_cache = std::move(cache);
  o.cache_index_and_filter_blocks = true;
  o.cache_index_and_filter_blocks_with_high_priority = true;
  o.pin_top_level_index_and_filter = true;
  o.index_type = rocksdb::BlockBasedTableOptions::kTwoLevelIndexSearch;
  o.partition_filters = true;
  o.metadata_block_size = 4096;
  o.format_version = 5;
  o.checksum = rocksdb::kXXH3;
  o.filter_policy = std::make_shared<Filters>(switches);
  if (point) {
    o.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
  }
  return std::make_shared<Tables>(std::move(switches), std::move(o));
}

}  // namespace keelstate
