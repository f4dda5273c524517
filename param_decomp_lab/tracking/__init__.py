"""Where metrics go while a run trains, and what is watched in them."""
