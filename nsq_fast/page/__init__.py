"""What pages for people are made of: tables of HTML, drawings of SVG, with nothing from outside. No I/O."""
