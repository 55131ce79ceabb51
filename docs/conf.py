"Settings of the site: Sphinx with myst-nb and furo, from the outputs that the notebooks hold."

project = "isaac_loop"
author = copyright = "The isaac_loop authors"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True  # A link that leads nowhere is an error

nb_execution_mode = "off"  # Outputs are stored in the notebooks
nb_render_markdown_format = "gfm"  # Tables in outputs are Markdown
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "isaac_loop"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"
pygments_dark_style = "monokai"
