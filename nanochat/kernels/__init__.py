"""The operators that the model calls: one interface, one file per kind of device."""
