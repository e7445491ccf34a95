// Drives the plugin library as TensorRT would, without a TensorRT builder. Built once per TensorRT major version.
//   plugin_host PLUGINS.so                     life cycle, fields and refusals of every plugin
//   plugin_host PLUGINS.so LEAN.so             the same, the creators taken from the runtime's own registry
//   plugin_host PLUGINS.so --run FILE [LEAN.so]        enqueue on a GPU with the tensors of FILE (see device.cpp)
// Exits 0 when every check held; each failure is one line.
#include "host.h"

namespace host {
namespace {

nvinfer1::IPluginRegistry* registry = nullptr;
nvinfer1::IPluginCreatorInterface* const* listed = nullptr;
int32_t numListed = 0;

void* open(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) std::printf("FAILED %s\n", dlerror());
  return library;
}

bool listCreators(void* plugins) {
  using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
  auto getCreators = reinterpret_cast<GetCreators>(dlsym(plugins, "getCreators"));
  if (getCreators == nullptr) return false;
  listed = getCreators(numListed);
  return true;
}

bool loadThroughRegistry(const char* lean, const char* plugins) {
  void* library = open(lean);
  if (library == nullptr) return false;
  auto getRegistry = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(library, "getPluginRegistry"));
  if (getRegistry == nullptr) return false;
  registry = getRegistry();
  return registry->loadLibrary(plugins) != nullptr;
}

void keepReport(const rssm_error* error) { lastReport() = error->message; }

}  // namespace

nvinfer1::IPluginCreatorV3One* creator(const char* plugin) {
  nvinfer1::IPluginCreatorInterface* found = nullptr;
  if (registry != nullptr) found = registry->getCreator(plugin, "1", "replayssm");
  for (int32_t i = 0; registry == nullptr && i < numListed; ++i) {
    auto* candidate = static_cast<nvinfer1::IPluginCreatorV3One*>(listed[i]);
    if (std::strcmp(candidate->getPluginName(), plugin) == 0) found = candidate;
  }
  if (found == nullptr || std::string(found->getInterfaceInfo().kind) != "PLUGIN CREATOR_V3ONE") {
    std::printf("FAILED no creator of version 3 for %s\n", plugin);
    std::exit(1);
  }
  return static_cast<nvinfer1::IPluginCreatorV3One*>(found);
}

}  // namespace host

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  void* plugins = host::open(argv[1]);
  if (plugins == nullptr) return 1;
  auto setLog = reinterpret_cast<void (*)(rssm_trt_log)>(dlsym(plugins, "rssm_trt_set_log"));
  if (setLog == nullptr || !host::listCreators(plugins)) return 1;
  setLog(host::keepReport);
  if (argc >= 4 && std::strcmp(argv[2], "--run") == 0) {
    if (argc > 4 && !host::loadThroughRegistry(argv[4], argv[1])) return 1;
    return host::runOnDevice(argv[3]);
  }
  if (argc == 3 && !host::loadThroughRegistry(argv[2], argv[1])) return 1;
  int checked = 0;
  for (const host::Case& c : host::cases()) {
    host::checkLifeCycle(c);
    host::checkFields(c);
    host::checkRefusals(c);
    ++checked;
  }
  std::printf("%d forms of plugins checked, %d failures\n", checked, host::failures());
  return host::failures() == 0 ? 0 : 1;
}
