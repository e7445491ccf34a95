"""Request and response bodies of each endpoint. Unknown fields are refused, numbers are finite, nothing is coerced."""
