module @loop {
  func.func @main(%arg0: tensor<100xf32> loc("x"), %arg1: tensor<100xf32> loc("y")) -> tensor<100xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32> loc(#loc)
    %0:3 = stablehlo.while(%iterArg = %c, %iterArg_0 = %arg0, %iterArg_1 = %arg1) : tensor<i32>, tensor<100xf32>, tensor<100xf32>
    cond {
      %c_2 = stablehlo.constant dense<5> : tensor<i32> loc(#loc)
      %1 = stablehlo.compare  LT, %iterArg, %c_2 : (tensor<i32>, tensor<i32>) -> tensor<i1> loc(#loc)
      stablehlo.return %1 : tensor<i1> loc(#loc)
    } do {
      %c_2 = stablehlo.constant dense<1> : tensor<i32> loc(#loc)
      %1 = stablehlo.add %iterArg, %c_2 : tensor<i32> loc(#loc)
      %2 = stablehlo.add %iterArg_0, %iterArg_1 : tensor<100xf32> loc(#loc)
      stablehlo.return %1, %2, %iterArg_1 : tensor<i32>, tensor<100xf32>, tensor<100xf32> loc(#loc)
    } loc(#loc)
    return %0#1 : tensor<100xf32> loc(#loc)
  } loc(#loc)
} loc(#loc)
