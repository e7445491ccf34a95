"""Reference operations in plain torch: slow, CPU or any device torch runs on, checked against the specification."""
