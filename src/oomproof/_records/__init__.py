"""What passes between the rooms: frozen, printable, to and from JSON."""
