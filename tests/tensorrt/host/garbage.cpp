// Inputs as an engine builder has them when it times candidates: uninitialised memory, zeros, anything. Ids and cursors far
// out of range must do no harm, nor must valid ids beside cursors, lengths and carries that are not.
#include <algorithm>
#include <climits>
#include <random>

#include "host.h"

namespace host {
namespace {

constexpr unsigned char kBytes[] = {0x7f, 0x00, 0xff};  // the first kinds: huge, zero, negative or not a number
constexpr int kUniform = static_cast<int>(sizeof(kBytes));

// Mostly what names a slot, a length or an expert, beside what nothing has.
constexpr int64_t kIntegers[] = {0, 1, 2, 3, 4, -1, -2, 9, 100, 1 << 20, INT_MAX, INT_MAX - 1, INT_MIN};

template <class Word, class Next>
void fill(std::vector<char>& data, Next& next) {
  for (size_t at = 0; at < data.size(); at += sizeof(Word)) {
    Word value = static_cast<Word>(next());
    std::memcpy(data.data() + at, &value, std::min(sizeof(value), data.size() - at));
  }
}

}  // namespace

size_t bytesOf(const Input& input) {
  size_t bytes = 1;
  switch (input.type) {
    case DataType::kINT64: bytes = 8; break;
    case DataType::kFLOAT:
    case DataType::kINT32: bytes = 4; break;
    case DataType::kHALF:
    case DataType::kBF16: bytes = 2; break;
    default: break;
  }
  for (int64_t size : input.dims) bytes *= static_cast<size_t>(size);
  return bytes;
}

std::vector<char> garbage(const Input& input, int kind, uint32_t place) {
  std::vector<char> data(bytesOf(input), static_cast<char>(kind < kUniform ? kBytes[kind] : 0));
  if (kind < kUniform) return data;
  std::mt19937 random(1000 * static_cast<uint32_t>(kind) + place);
  auto integer = [&] { return kIntegers[random() % (sizeof(kIntegers) / sizeof(kIntegers[0]))]; };
  if (input.type == DataType::kINT32) {
    fill<int32_t>(data, integer);
  } else if (input.type == DataType::kINT64) {
    fill<int64_t>(data, integer);
  } else {
    fill<uint32_t>(data, random);
  }
  return data;
}

}  // namespace host
