"""Pure functions on arrays, one concept a file. They know no configuration, no parameter and no device."""
