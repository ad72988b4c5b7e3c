// The parts from which native_store.cc builds the options of a family.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "rocksdb/db.h"
#include "rocksdb/memtablerep.h"
#include "rocksdb/merge_operator.h"
#include "rocksdb/slice_transform.h"
#include "rocksdb/table.h"

namespace keelstate {

// Numbers of engine.Use.
enum Use : uint8_t { kScanned = 0, kPoint = 1 };

// Numbers of rocks.FilterMode.
enum FilterMode : uint8_t { kFilterNone = 0, kFilterWholeKey = 1, kFilterPrefix = 2 };

// Numbers of engine.MergeKind.
enum MergeKind : uint8_t {
  kMergeNone = 0,
  kMergeSum128 = 1,
  kMergeMin = 2,
  kMergeMax = 3,
  kMergeFirst = 4,
  kMergeAnd64 = 5,
  kMergeOr64 = 6,
  kMergeSumCount = 7,
};

// What can be switched while a family is open. A change holds from the next
// memtable or SST file on.
struct Switches {
  std::atomic<uint8_t> use{kScanned};
  std::atomic<uint8_t> filter{kFilterNone};
};

// PrefixLength is the length of the prefix of a key: the group bytes and the
// escaped key with its terminator 0x00 0x01, or the whole key if it has none.
// *terminated tells which. It depends on no byte after the prefix, so the keys
// of one prefix are contiguous.
size_t PrefixLength(const char* key, size_t len, size_t group_width, bool* terminated);

std::shared_ptr<const rocksdb::SliceTransform> NewPrefix(size_t group_width);

// The memtable of a family: a hash linked list while switches->use is kPoint,
// else a skip list.
std::shared_ptr<rocksdb::MemTableRepFactory> NewMemtables(std::shared_ptr<Switches> switches, size_t buffer_bytes);

// Tables with partitioned index and filters; switches->filter decides per SST
// what is in the filter.
std::shared_ptr<rocksdb::TableFactory> NewTables(std::shared_ptr<Switches> switches,
                                                 std::shared_ptr<rocksdb::Cache> cache, bool point);

std::shared_ptr<rocksdb::MergeOperator> NewMerge(uint8_t kind);

enum class Operand { kGood, kBad, kUnknownVersion };

// CheckOperand tells whether v is a value of the merge kind.
Operand CheckOperand(uint8_t kind, const rocksdb::Slice& v);

}  // namespace keelstate
