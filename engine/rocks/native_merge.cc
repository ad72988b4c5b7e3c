// Merge operators: the native twins of engine.Fold. Every kind is exact and
// associative, headers included, so full and partial merges share one fold.

#include <algorithm>
#include <cstring>
#include <deque>

#include "native_parts.h"

namespace keelstate {
namespace {

using rocksdb::Logger;
using rocksdb::Slice;

// The value header of engine/header.go.
constexpr size_t kHeaderLen = 19;
constexpr uint8_t kHeaderVersion = 0x10;
constexpr uint64_t kSignBit = uint64_t{1} << 63;

uint64_t Load64(const char* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_bswap64(v);
}

void Store64(char* p, uint64_t v) {
  v = __builtin_bswap64(v);
  std::memcpy(p, &v, sizeof v);
}

// The exact payload length of a kind, or -1 where any will do.
int PayloadLength(uint8_t kind) {
  switch (kind) {
    case kMergeSum128:
      return 16;
    case kMergeAnd64:
    case kMergeOr64:
      return 8;
    case kMergeSumCount:
      return 24;
    default:
      return -1;
  }
}

// Fold accumulates values, oldest first. For the kinds that choose a payload it
// keeps a slice of the chosen value, for the others the payload as words.
class Fold {
 public:
  explicit Fold(uint8_t kind) : kind_(kind), words_(std::max(PayloadLength(kind), 0) / 8) {}

  // Add returns false if v is not a value of the kind.
  bool Add(const Slice& v) {
    if (CheckOperand(kind_, v) != Operand::kGood) return false;
    uint64_t w[3] = {0, 0, 0};
    for (int i = 0; i < words_; i++) w[i] = Load64(v.data() + kHeaderLen + 8 * i);
    Slice payload(v.data() + kHeaderLen, v.size() - kHeaderLen);
    uint64_t seq = Load64(v.data() + 3), ts = Load64(v.data() + 11);
    newest_ = v.data();
    if (first_) {
      first_ = false;
      sequence_ = seq, timestamp_ = ts, payload_ = payload;
      std::copy(w, w + 3, word_);
      return true;
    }
    sequence_ = std::max(sequence_, seq);
    timestamp_ = std::max(timestamp_, ts);
    Combine(payload, w);
    return true;
  }

  // Encode writes the folded value; at least one was added.
  void Encode(std::string* out) const {
    out->resize(kHeaderLen + (words_ > 0 ? 8 * words_ : payload_.size()));
    char* p = &(*out)[0];
    std::memcpy(p, newest_, 3);  // layout version, flags and codec version
    Store64(p + 3, sequence_);
    Store64(p + 11, timestamp_);
    if (words_ == 0) {
      if (!payload_.empty()) std::memcpy(p + kHeaderLen, payload_.data(), payload_.size());
      return;
    }
    for (int i = 0; i < words_; i++) Store64(p + kHeaderLen + 8 * i, word_[i]);
  }

 private:
  void Combine(const Slice& payload, const uint64_t* w) {
    switch (kind_) {
      case kMergeMin:
        if (payload.compare(payload_) < 0) payload_ = payload;
        break;
      case kMergeMax:
        if (payload.compare(payload_) > 0) payload_ = payload;
        break;
      case kMergeAnd64:
        word_[0] = ((word_[0] ^ kSignBit) & (w[0] ^ kSignBit)) ^ kSignBit;
        break;
      case kMergeOr64:
        word_[0] = ((word_[0] ^ kSignBit) | (w[0] ^ kSignBit)) ^ kSignBit;
        break;
      case kMergeSumCount:
        word_[2] += w[2];
        AddSum(w);
        break;
      case kMergeSum128:
        AddSum(w);
        break;
      default:  // kMergeFirst: the oldest payload stays
        break;
    }
  }

  void AddSum(const uint64_t* w) {
    uint64_t low = word_[1] + w[1];
    word_[0] += w[0] + (low < w[1] ? 1 : 0);
    word_[1] = low;
  }

  const uint8_t kind_;
  const int words_;
  bool first_ = true;
  const char* newest_ = nullptr;
  uint64_t sequence_ = 0, timestamp_ = 0;
  Slice payload_;
  uint64_t word_[3] = {0, 0, 0};
};

class FoldOperator : public rocksdb::MergeOperator {
 public:
  explicit FoldOperator(uint8_t kind) : kind_(kind), name_("keelstate.merge." + std::to_string(kind) + ".v1") {}

  const char* Name() const override { return name_.c_str(); }

  bool FullMergeV2(const MergeOperationInput& in, MergeOperationOutput* out) const override {
    Fold fold(kind_);
    if (in.existing_value != nullptr && !fold.Add(*in.existing_value)) return false;
    if (in.existing_value == nullptr && in.operand_list.empty()) return false;
    for (const Slice& operand : in.operand_list) {
      if (!fold.Add(operand)) return false;
    }
    fold.Encode(&out->new_value);
    return true;
  }

  // A false answer keeps the operands apart; the full merge reports what is
  // wrong with them.
  bool PartialMergeMulti(const Slice& /*key*/, const std::deque<Slice>& operands, std::string* out,
                         Logger* /*logger*/) const override {
    if (operands.empty()) return false;
    Fold fold(kind_);
    for (const Slice& operand : operands) {
      if (!fold.Add(operand)) return false;
    }
    fold.Encode(out);
    return true;
  }

 private:
  const uint8_t kind_;
  const std::string name_;
};

}  // namespace

Operand CheckOperand(uint8_t kind, const Slice& v) {
  if (v.size() < kHeaderLen) return Operand::kBad;
  if ((static_cast<uint8_t>(v[0]) & 0xf0) != kHeaderVersion) return Operand::kUnknownVersion;
  int n = PayloadLength(kind);
  if (n >= 0 && v.size() - kHeaderLen != static_cast<size_t>(n)) return Operand::kBad;
  return Operand::kGood;
}

std::shared_ptr<rocksdb::MergeOperator> NewMerge(uint8_t kind) {
  if (kind == kMergeNone || kind > kMergeSumCount) return nullptr;
  return std::make_shared<FoldOperator>(kind);
}

}  // namespace keelstate
