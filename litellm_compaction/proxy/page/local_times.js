// Shows each time of the page in the browser's time zone. UTC stays in its title; without scripts it stays as it is.
const local = (when, digits) =>
  new Date(when - when.getTimezoneOffset() * 60000).toISOString().slice(0, digits).replace("T", " ");
for (const time of document.querySelectorAll("time")) {
  const utc = time.textContent;
  time.textContent = local(new Date(time.dateTime), utc.length);
  time.title = `${utc} UTC`;
}
for (const zone of document.querySelectorAll(".zone")) {
  zone.textContent = `Times are local, ${String(new Date()).match(/GMT\S*/)}; point at one for UTC.`;
}
