// Plugins with real tensors: reads a program, runs its steps on one stream, writes what the plugins wrote.
//
// FILE, little endian, written by plugin_cases.py; a list is an int32 count and its elements, a text a list of characters:
//   list of tensors: int32 type, list of int64 dims
//   list of calls, in order: text plugin; list of fields: text name, int32 real, int32 value or float32;
//     list of inputs: int32 tensor, int32 in place; list of dense outputs: int32 tensor
//   lists of int32 tensors: with data at the start, given to each step, kept after each step, kept at the end
//   int32 steps; data of the start's tensors, in order; then for each step that of those it is given
// FILE.out: the tensors kept after each step, then those kept at the end. FILE.replayed: the same, the steps run once more
// from the same start as replays of one CUDA graph. FILE.thread0 and on: by threads at the same time, each with plugins
// attached to a context of its own; every other one replays a graph of its own.
// Before the first step the program runs over several kinds of garbage, as an engine builder times its candidates: see
// garbage.cpp.
#include <algorithm>
#include <fstream>
#include <thread>

#include "program.h"

namespace host {
namespace {

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {}
  bool good() const { return file_.good(); }
  std::streampos place() { return file_.tellg(); }
  void goTo(std::streampos place) { file_.seekg(place); }
  template <class T = int32_t>
  T number() {
    T value{};
    file_.read(reinterpret_cast<char*>(&value), sizeof(value));
    return value;
  }
  template <class T = int32_t>
  std::vector<T> numbers() {
    std::vector<T> values(static_cast<size_t>(number()));
    for (T& value : values) value = number<T>();
    return values;
  }
  std::string text() {
    std::string value(static_cast<size_t>(number()), '\0');
    file_.read(value.data(), static_cast<std::streamsize>(value.size()));
    return value;
  }
  std::vector<char> bytes(size_t count) {
    std::vector<char> value(count);
    file_.read(value.data(), static_cast<std::streamsize>(count));
    return value;
  }

 private:
  std::ifstream file_;
};

Call readCall(Reader& reader) {
  Call call;
  call.plugin = reader.text();
  for (int32_t left = reader.number(); left > 0; --left) {
    call.names.push_back(std::make_unique<std::string>(reader.text()));
    PluginFieldType type = reader.number() != 0 ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32;
    call.fields.push_back({call.names.back()->c_str(), reader.number(), type});
  }
  for (int32_t left = reader.number(); left > 0; --left) {
    call.inputs.push_back(reader.number());
    call.inPlace.push_back(reader.number() != 0);
  }
  call.results = reader.numbers();
  return call;
}

Description readDescription(Reader& reader) {
  Description all;
  for (int32_t left = reader.number(); left > 0; --left) {
    DataType type = static_cast<DataType>(reader.number());
    all.tensors.push_back({type, reader.numbers<int64_t>(), false});
  }
  for (int32_t left = reader.number(); left > 0; --left) all.calls.push_back(readCall(reader));
  for (auto* list : {&all.start, &all.given, &all.outputs, &all.states}) *list = reader.numbers();
  all.steps = reader.number();
  return all;
}

// Waits for the copies: the program's stream does not.
void load(Reader& reader, const Program& program, const std::vector<int32_t>& tensors) {
  for (int32_t tensor : tensors) {
    std::vector<char> data = reader.bytes(program.bytes(tensor));
    good(cudaMemcpy(program.memory(tensor), data.data(), data.size(), cudaMemcpyHostToDevice), "copy");
  }
  good(cudaStreamSynchronize(cudaStreamLegacy), "copies");
}

void keep(std::ofstream& out, const Program& program, const std::vector<int32_t>& tensors) {
  for (int32_t tensor : tensors) {
    std::vector<char> data(program.bytes(tensor));
    good(cudaMemcpy(data.data(), program.memory(tensor), data.size(), cudaMemcpyDeviceToHost), "copy back");
    out.write(data.data(), static_cast<std::streamsize>(data.size()));
  }
}

// The steps whose data come next in `reader`, from the start before them.
bool runSteps(Reader& reader, Program& program, const std::string& results, bool captured) {
  const Description& all = program.description();
  load(reader, program, all.start);
  if (captured && !program.capture()) return false;
  std::ofstream file(results, std::ios::binary);
  for (int32_t step = 0; step < all.steps; ++step) {
    load(reader, program, all.given);
    if (!program.run()) return false;
    keep(file, program, all.outputs);
  }
  keep(file, program, all.states);
  return reader.good();
}

bool runInThreads(const char* path, std::streampos start, const Program& first) {
  constexpr int kThreads = 4;
  bool held[kThreads] = {};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Reader reader(path);
      reader.goTo(start);
      Program program(first.description());
      held[i] = program.open(&first) &&
                runSteps(reader, program, path + (".thread" + std::to_string(i)), i % 2 != 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return std::all_of(held, held + kThreads, [](bool one) { return one; });
}

}  // namespace

int runOnDevice(const char* path) {
  Reader reader(path);
  if (!reader.good()) return 1;
  const Description all = readDescription(reader);
  Program program(all);
  if (!program.open()) return 1;
  for (int kind = 0; kind < kGarbageKinds; ++kind) {
    if (!program.spoil(kind) || !program.run()) return 1;
  }
  const std::streampos start = reader.place();
  if (!runSteps(reader, program, path + std::string(".out"), false)) return 1;
  reader.goTo(start);
  if (!runSteps(reader, program, path + std::string(".replayed"), true)) return 1;
  if (!runInThreads(path, start, program)) return 1;
  std::printf("%zu plugins, %d steps\n", all.calls.size(), all.steps);
  return 0;
}

}  // namespace host
