"use strict";
// Fetch this page again and put its main part in the place of the old one. Without this script, reload the page.
async function refresh() {
  const main = document.getElementById("main");
  // Keep a focused link or table, and skip hidden pages.
  if (!document.hidden && !main.contains(document.activeElement)) {
    let found = null;
    try {
      const answer = await fetch(location.href, {cache: "no-store", redirect: "error"});
      const text = answer.ok ? await answer.text() : "";
      found = new DOMParser().parseFromString(text, "text/html").getElementById("main");
    } catch { /* no answer */ }
    document.getElementById("lost").hidden = found !== null;
    if (found) main.replaceWith(found);
    // The page may forbid its own renewal.
    if (found && found.dataset.live !== "yes") return;
  }
  setTimeout(refresh, 5000);
}
setTimeout(refresh, 5000);
