"""Operations on state pools: what the stateful layers call. `reference` is plain torch and defines the results."""
