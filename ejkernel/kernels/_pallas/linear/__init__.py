"""The linear operations on TPUs: `_interface` registers them."""
