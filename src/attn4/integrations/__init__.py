"""Ways into other packages. Each is switched on by a call, never by an import."""
