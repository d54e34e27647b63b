/* What scrolls sideways can be reached by keyboard, and the copy buttons are no landmarks: the theme makes both. */
function mend() {
  for (const element of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) {
    if (element.scrollWidth > element.clientWidth) {
      element.tabIndex = 0;
    } else {
      element.removeAttribute("tabindex");
    }
  }
  for (const element of document.querySelectorAll("nav.md-code__nav:not([role])")) {
    element.setAttribute("role", "none");
  }
}

document.addEventListener("DOMContentLoaded", () => {
  mend();
  new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
  addEventListener("resize", mend);
});
