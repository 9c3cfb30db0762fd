"""The operators that the model is made of, one interface, one file for each kind of device."""
