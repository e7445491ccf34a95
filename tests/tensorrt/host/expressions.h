// The least that getOutputShapes needs of TensorRT's symbolic dimensions: constants.
#pragma once

#include <memory>
#include <vector>

#include "NvInferRuntime.h"

namespace host {

class Constant final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
  explicit Constant(int64_t value) : value_(value) { mImpl = this; }
  bool isConstant() const override { return true; }
  int64_t getConstantValue() const override { return value_; }
  bool isSizeTensor() const override { return false; }

 private:
  int64_t value_;
};

class Expressions final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  Expressions() { mImpl = this; }
  const nvinfer1::IDimensionExpr* constant(int64_t value) override {
    made_.push_back(std::make_unique<Constant>(value));
    return made_.back().get();
  }
  const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation, const nvinfer1::IDimensionExpr&,
                                            const nvinfer1::IDimensionExpr&) override {
    return nullptr;
  }
  const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                    const nvinfer1::IDimensionExpr&) override {
    return nullptr;
  }

 private:
  std::vector<std::unique_ptr<Constant>> made_;
};

}  // namespace host
